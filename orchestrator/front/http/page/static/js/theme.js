// Light, dark or as the system has it. A classic script in the head, so that the first paint is right.
"use strict";
(() => {
  const themes = ["auto", "light", "dark"];
  const root = document.documentElement;
  let theme = "auto";
  try {
    theme = localStorage.getItem("flyspec-theme") ?? "auto";
  } catch {} // storage may be forbidden
  if (!themes.includes(theme)) theme = "auto";
  root.dataset.theme = theme;

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const tell = () => (button.textContent = `Theme: ${theme}`);
    tell();
    button.addEventListener("click", () => {
      theme = themes[(themes.indexOf(theme) + 1) % themes.length];
      root.dataset.theme = theme;
      try {
        localStorage.setItem("flyspec-theme", theme);
      } catch {}
      tell();
      root.dispatchEvent(new Event("themechange"));
    });
  });
})();
