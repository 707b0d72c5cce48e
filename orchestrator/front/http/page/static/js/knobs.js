// The settings: what the form says, as settings of a link and as the body of a request.
//
// Settings are an object of strings by the API's names, without those that are left to the server.

import { byId, make } from "./dom.js";

const SHARED = {
  prompt: "prompt", api: "api", rule: "rule", drafter: "drafter", max_tokens: "max-tokens",
  temperature: "temperature", seed: "seed", repeats: "repeats", max_loose_tokens: "max-loose-tokens",
  max_loose_cost_nats: "max-loose-cost",
};
const NUMBERS = new Set(["max_loose_tokens", "max_loose_cost_nats"]);

export class Knobs {
  #rules;

  /** `rules` is the server's table. */
  constructor(rules, onChange) {
    this.#rules = Object.fromEntries(rules.map((rule) => [rule.name, rule]));
    const changed = () => {
      this.#update();
      onChange();
    };
    for (const element of [byId("race-form"), byId("settings"), byId("rule")]) {
      element.addEventListener("input", changed);
    }
    this.#update();
  }

  get #fieldset() {
    return document.querySelector(`.knobs[data-rule="${CSS.escape(byId("rule").value)}"]`);
  }

  #update() {
    const name = byId("rule").value;
    for (const fieldset of document.querySelectorAll(".knobs")) {
      fieldset.hidden = fieldset.disabled = fieldset.dataset.rule !== name;
    }
    byId("k").disabled = byId("k-auto").checked;
    for (const parameter of this.#rules[name]?.parameters ?? []) this.#updateRange(parameter);
    for (const example of document.querySelectorAll(".example")) {
      example.ariaPressed = String(example.dataset.prompt === byId("prompt").value);
    }
  }

  /** Shows the range of the measure that is chosen; without one, the parameter does not apply. */
  #updateRange(parameter) {
    if (!parameter.ranges.length) return;
    const field = this.#fieldset.querySelector(`[name="${parameter.name}"]`);
    const measure = parameter.measured_by && this.#valueOf(parameter.measured_by);
    const range = parameter.ranges.find((one) => one.measure === null || one.measure === measure);
    field.disabled = !range;
    field.min = range?.minimum ?? "";
    field.max = range?.maximum ?? "";
    const unit = parameter.unit ? ` ${parameter.unit}` : "";
    const text = range ? ` (${range.minimum} to ${range.maximum}${unit})` : ` (not with ${measure})`;
    field.closest(".field").querySelector(".range").textContent = text;
  }

  #valueOf(name) {
    const given = this.#fieldset.querySelector(`[name="${name}"]`)?.value;
    return given || this.#rules[byId("rule").value].parameters.find((one) => one.name === name)?.default;
  }

  /** Returns the name of the measure in which a rule takes entropies, if it does. */
  measureOf(settings) {
    const parameter = this.#rules[settings.rule]?.parameters.find(({ name }) => name === "entropy_measure");
    return settings.entropy_measure ?? parameter?.default ?? "";
  }

  /** Offers rules of which only the name is known, besides those of the table. */
  offerRules(names) {
    const select = byId("rule");
    const known = new Set([...select.options].map((option) => option.value));
    const fresh = names.filter((name) => !known.has(name));
    select.append(...fresh.map((name) => make("option", { value: name, textContent: name })));
  }

  /** Offers drafters to choose from; keeps the choice. */
  offerDrafters(names) {
    const select = byId("drafter");
    const chosen = select.value;
    const options = names.map((name) => make("option", { value: name, textContent: name }));
    select.replaceChildren(select.options[0], ...options);
    select.value = names.includes(chosen) ? chosen : "";
  }

  read() {
    const settings = {};
    for (const [name, id] of Object.entries(SHARED)) settings[name] = byId(id).value.trim();
    settings.prompt = byId("prompt").value;
    settings.num_speculative_tokens = byId("k-auto").checked ? "auto" : byId("k").value;
    for (const field of this.#fieldset?.querySelectorAll("[name]:enabled") ?? []) settings[field.name] = field.value;
    return Object.fromEntries(Object.entries(settings).filter(([, value]) => value !== ""));
  }

  /** Sets the form to a link's settings. Returns what this server does not have, in words. */
  write(settings) {
    const missing = [];
    const { num_speculative_tokens: k = "auto", rule = byId("rule").value } = settings;
    setField(byId("rule"), rule, missing);
    this.#update();
    const fields = this.#fieldset?.querySelectorAll("[name]") ?? [];
    for (const field of fields) if (field.dataset.type === "choice") setField(field, settings[field.name] ?? "", missing);
    for (const field of fields) setField(field, settings[field.name] ?? "", missing);
    for (const [name, id] of Object.entries(SHARED)) {
      if (name !== "rule") setField(byId(id), settings[name] ?? defaultOf(byId(id)), missing);
    }
    byId("k-auto").checked = k === "auto";
    if (k !== "auto") byId("k").value = k;
    this.#update();
    return missing;
  }

  /** Returns {path, body, speculation: {plain, rule}, repeats} of a race, with the given seed. */
  setupOf(settings, seed) {
    const body = {
      max_tokens: Number(settings.max_tokens), temperature: Number(settings.temperature), seed,
      ...(settings.api === "chat"
        ? { messages: [{ role: "user", content: settings.prompt }] }
        : { prompt: settings.prompt }),
    };
    const rule = { name: settings.rule };
    for (const parameter of this.#rules[settings.rule]?.parameters ?? []) {
      if (parameter.name in settings) rule[parameter.name] = typed(parameter, settings[parameter.name]);
    }
    const speculation = { rule };
    for (const name of ["drafter", ...NUMBERS]) {
      if (name in settings) speculation[name] = NUMBERS.has(name) ? Number(settings[name]) : settings[name];
    }
    if (settings.num_speculative_tokens === "auto") speculation.adaptive = true;
    else speculation.num_speculative_tokens = Number(settings.num_speculative_tokens);
    const path = settings.api === "chat" ? "v1/chat/completions" : "v1/completions";
    const plain = { num_speculative_tokens: 0 };
    return { path, body, speculation: { plain, rule: speculation }, repeats: settings.repeats ? Number(settings.repeats) : null };
  }
}

function typed({ type, values }, text) {
  if (type === "choice") return values?.[text] ?? text;
  return type === "boolean" ? text === "true" : Number(text);
}

const defaultOf = (field) =>
  field.tagName === "SELECT" ? ([...field.options].find((one) => one.defaultSelected) ?? field.options[0]).value : field.defaultValue;

function setField(field, value, missing) {
  field.value = value;
  if (field.value !== value && field.tagName === "SELECT") {
    field.selectedIndex = 0;
    missing.push(`${field.labels[0]?.textContent.trim().toLowerCase()} ${value}`);
  }
}
