// The card beside a token or a bar. Escape closes it.

import { byId, make } from "./dom.js";

const MARGIN = 8;

export class Card {
  #root = byId("card");
  #owner = null;

  constructor() {
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.hide());
  }

  /** Shows a description below (or above) a rectangle of the window, for an owner, who may hide it. */
  show(owner, { title, rows, drafts = [] }, rect) {
    this.#owner = owner;
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
    // Its place is in the page, so that it scrolls with what it describes.
    this.#root.style.left = `${left + scrollX}px`;
    this.#root.style.top = `${top + scrollY}px`;
  }

  /**
   * Hides it; with an owner, only what that owner showed. Scrolling may take a lane away from under a pointer at rest
   * after the keyboard has gone to a bar.
   */
  hide(owner = this.#owner) {
    if (owner === this.#owner) this.#root.hidden = true;
  }
}
