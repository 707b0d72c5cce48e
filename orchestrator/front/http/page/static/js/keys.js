// API keys: kept in this tab until it is closed, never in a link.

import { byId } from "./dom.js";

/** Binds a password field to session storage. Returns a function that reads the key. */
export function keyField(id, onChange = () => {}) {
  const field = byId(id);
  if (!field) return () => ""; // an installation without keys
  const name = `flyspec-${id}`;
  try {
    field.value = sessionStorage.getItem(name) ?? "";
  } catch {} // storage may be forbidden
  field.addEventListener("change", () => {
    try {
      sessionStorage.setItem(name, field.value.trim());
    } catch {}
    onChange();
  });
  return () => field.value.trim();
}
