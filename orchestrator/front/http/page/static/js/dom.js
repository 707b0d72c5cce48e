// Small helpers for elements, and what is announced to screen readers.

export const byId = (id) => document.getElementById(id);

/** Creates an element with properties, `data` and children; null children are left out. */
export function make(tag, { data = {}, ...properties } = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  Object.assign(element.dataset, data);
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Has screen readers say a text: once per event that matters, never per token. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** Returns a colour of the style sheet, resolved for the current theme, for canvases. */
export function colorOf(name) {
  const probe = make("span", { hidden: true });
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const showRate = (tokensPerSecond) =>
  tokensPerSecond >= 20 ? whole.format(tokensPerSecond) : tokensPerSecond.toFixed(1);

export const showTime = (ms) => (ms < 1000 ? `${ms.toFixed(1)} ms` : `${(ms / 1000).toFixed(2)} s`);

export const number = (value) => whole.format(value);

export const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;

/** Shows spaces at the ends of a token, and its line breaks. */
export const visible = (text) =>
  text === "" ? "(no text)" : text.replace(/^ | $/g, "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
