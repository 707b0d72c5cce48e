// A lane: one run's text, token by token.

import { make } from "./dom.js";
import { recoveryText } from "./describe.js";

export class Lane {
  #text;
  #tokens = []; // elements, one per token
  #timed = []; // {element, ms}: tokens and recoveries in order
  #shown = 0;
  #current = null;
  #notice = null;

  /** `onPoint(index, element, byKey)` when a token is pointed at; index null: none is. */
  constructor(root, onPoint) {
    this.#text = root.querySelector(".lane-text");
    const pointed = (event) => {
      const token = event.target.closest(".token");
      if (token) onPoint(Number(token.dataset.index), token, false);
    };
    this.#text.addEventListener("pointerover", pointed);
    this.#text.addEventListener("click", pointed);
    this.#text.addEventListener("pointerleave", () => onPoint(null));
    this.#text.addEventListener("blur", () => this.#select(null, onPoint));
    this.#text.addEventListener("keydown", (event) => this.#onKey(event, onPoint));
  }

  #onKey(event, onPoint) {
    const last = this.#tokens.length - 1;
    const at = this.#current ?? -1;
    const target = {
      ArrowRight: Math.min(at + 1, last), ArrowLeft: Math.max(at - 1, 0), Home: 0, End: last, Escape: null,
    }[event.key];
    if (target === undefined || last < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.#select(target, onPoint);
  }

  #select(index, onPoint) {
    this.#tokens[this.#current]?.classList.remove("current");
    this.#current = index;
    const token = this.#tokens[index];
    token?.classList.add("current");
    token?.scrollIntoView({ block: "nearest" });
    onPoint(token ? index : null, token, true);
  }

  begin() {
    this.#tokens = [];
    this.#timed = [];
    this.#current = this.#notice = null;
    this.#text.replaceChildren();
    this.#text.classList.add("live");
  }

  /** Appends what a recording has beyond what is shown. */
  progress(recording) {
    if (this.#notice?.dataset.open) {
      delete this.#notice.dataset.open;
      this.#notice.textContent = `The stream goes on after ${this.#notice.dataset.seconds} s.`;
    }
    const fresh = recording.tokens.slice(this.#tokens.length);
    const elements = fresh.map((token, place) => tokenElement(token, this.#tokens.length + place));
    this.#tokens.push(...elements);
    this.#text.append(...elements);
    this.#text.scrollTop = this.#text.scrollHeight;
  }

  /** Says in the text that the stream is silent. */
  silent(seconds, ready) {
    if (!this.#notice?.dataset.open) {
      this.#notice = make("span", { className: "recovery", data: { open: "true" } });
      this.#text.append(this.#notice);
    }
    this.#notice.dataset.seconds = seconds.toFixed(1);
    const what = ready ? "Waiting for the server" : "The target is lost; the stream waits until it is back";
    this.#notice.textContent = `${what}: ${seconds.toFixed(1)} s`;
    this.#text.scrollTop = this.#text.scrollHeight;
  }

  /** Shows a whole recording, its recoveries, and which tokens the other text does not have. */
  load(recording, differs) {
    this.begin();
    this.#text.classList.remove("live");
    const recoveries = [...recording.recoveries];
    recording.tokens.forEach((token, index) => {
      while (recoveries.length && recoveries[0].output_token_index <= index) {
        this.#addTimed(recoveryElement(recoveries.shift()), token.ms);
      }
      const element = tokenElement(token, index);
      element.classList.toggle("differs", differs[index]);
      this.#tokens.push(element);
      this.#addTimed(element, token.ms);
    });
    for (const recovery of recoveries) this.#addTimed(recoveryElement(recovery), recording.ms);
    this.#text.append(...this.#timed.map(({ element }) => element));
    this.#shown = this.#timed.length;
  }

  #addTimed(element, ms) {
    this.#timed.push({ element, ms });
  }

  /** Shows the text as it was at a time of the recording. */
  showUntil(ms) {
    const before = this.#shown;
    while (this.#shown > 0 && this.#timed[this.#shown - 1].ms > ms) {
      this.#shown -= 1;
      this.#timed[this.#shown].element.classList.add("later");
    }
    while (this.#shown < this.#timed.length && this.#timed[this.#shown].ms <= ms) {
      this.#timed[this.#shown].element.classList.remove("later");
      this.#shown += 1;
    }
    if (this.#shown === before) return;
    const last = this.#timed[Math.max(0, this.#shown - 1)]?.element;
    if (!last) return;
    const bottom = last.offsetTop + last.offsetHeight;
    if (bottom > this.#text.scrollTop + this.#text.clientHeight || last.offsetTop < this.#text.scrollTop) {
      this.#text.scrollTop = bottom - this.#text.clientHeight / 2;
    }
  }

  scrollToTop() {
    this.#text.scrollTop = 0;
  }

  /** Marks the tokens of a round; null: of none. */
  markRound(recording, round) {
    this.#tokens.forEach((element, index) => {
      element.classList.toggle("same-round", round !== null && recording.tokens[index].round === round);
    });
  }
}

function tokenElement(token, index) {
  const element = make("span", {
    className: "token", textContent: token.text, data: { origin: token.origin, index },
  });
  if (token.text === "") element.classList.add("end");
  if (/^\s*\n\s*$/.test(token.text)) element.classList.add("breaks");
  return element;
}

function recoveryElement(recovery) {
  return make("span", {
    className: "recovery", textContent: recoveryText(recovery), data: { kind: recovery.kind },
  });
}
