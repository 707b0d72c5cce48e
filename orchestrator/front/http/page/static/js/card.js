// The card beside a token or a bar. Escape closes it.

import { byId, make } from "./dom.js";

const MARGIN = 8;

export class Card {
  #root = byId("card");
  #place = "";

  constructor() {
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.hide());
    // Focus scrolls the page first, and is told of it when the card is already there.
    document.addEventListener(
      "scroll", () => this.#place !== `${scrollX} ${scrollY}` && this.hide(), { passive: true },
    );
  }

  /** Shows a description below (or above) a rectangle of the window. */
  show({ title, rows, drafts = [] }, rect) {
    const list = rows.flatMap(([name, value]) => [
      make("dt", { textContent: name }), make("dd", { textContent: value }),
    ]);
    const chips = drafts.map(({ text, fate, title: what }) =>
      make("span", { className: "fate", textContent: text, title: what, data: { fate } }),
    );
    this.#root.replaceChildren(
      make("h3", { textContent: title }), make("dl", {}, ...list),
      ...(chips.length ? [make("div", { className: "drafts" }, ...chips)] : []),
    );
    this.#root.hidden = false;
    const { width, height } = this.#root.getBoundingClientRect();
    const left = Math.max(MARGIN, Math.min(rect.left, innerWidth - width - MARGIN));
    const below = rect.bottom + MARGIN;
    const top = below + height < innerHeight ? below : Math.max(MARGIN, rect.top - height - MARGIN);
    this.#root.style.left = `${left}px`;
    this.#root.style.top = `${top}px`;
    this.#place = `${scrollX} ${scrollY}`;
  }

  hide() {
    this.#root.hidden = true;
  }
}
