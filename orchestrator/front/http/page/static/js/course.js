// The course: one runner's track, speed and time.

import { count, make, showRate, showTime } from "./dom.js";
import { rate } from "./recording.js";

const DENSE = 160; // tokens from which a strip has no gaps

export class Runner {
  #root;
  #recording = null;
  #rival = null; // the other's recording
  #shown = -1;

  constructor(root) {
    this.#root = root;
  }

  #part(name) {
    return this.#root.querySelector(`.${name}`);
  }

  set name(name) {
    this.#part("runner-name").textContent = name;
  }

  /** Shows an empty track; `state` is "recording", "waiting" or "". */
  begin(state) {
    this.#recording = null;
    this.#part("strip").replaceChildren();
    this.#part("strip").style.clipPath = "";
    this.#part("marker").style.left = "0";
    this.#part("rate").textContent = "–";
    this.#part("times").textContent = "\u00a0";
    this.state = state;
  }

  /** Says on the track what happens: "recording", "recorded", "waiting" or nothing. */
  set state(state) {
    this.#root.classList.remove("recording", "recorded", "waiting", "first", "beaten");
    if (state) this.#root.classList.add(state);
  }

  /** Shows how far a recording has come. */
  progress(recording) {
    this.#figures(recording.tokens.length, recording.ms);
  }

  load(recording, rival) {
    this.begin("");
    this.#recording = recording;
    this.#rival = rival;
    this.#shown = -1;
    const strip = this.#part("strip");
    strip.replaceChildren(...recording.tokens.map(({ origin }) => make("i", { data: { origin } })));
    strip.classList.toggle("dense", recording.tokens.length > DENSE);
    const passed = recording.tokens.filter(({ ms }) => ms <= rival.ms).length;
    [...strip.children].slice(passed).forEach((cell) => cell.classList.add("behind"));
    this.#part("notch").style.left = `${(100 * passed) / Math.max(1, recording.tokens.length)}%`;
  }

  /** Shows the state at a time of the recording; where it was when the other one won stays marked. */
  showUntil(ms) {
    const { tokens, ms: end } = this.#recording;
    const lead = this.#rival.ms - end;
    let shown = 0;
    while (shown < tokens.length && tokens[shown].ms <= ms) shown += 1;
    this.#figures(shown, Math.min(ms, end));
    this.#root.classList.toggle("first", lead > 0 && ms >= end);
    this.#root.classList.toggle("beaten", lead < 0 && ms >= this.#rival.ms);
    if (lead > 0 && ms >= end) this.#part("times").append(make("b", { textContent: `first, by ${showTime(lead)}` }));
    if (shown === this.#shown) return;
    this.#shown = shown;
    const percent = tokens.length ? (100 * shown) / tokens.length : 100;
    this.#part("strip").style.clipPath = `inset(0 ${100 - percent}% 0 0)`;
    this.#part("marker").style.left = `${percent}%`;
  }

  #figures(tokens, ms) {
    this.#part("rate").textContent = showRate(rate(tokens, ms));
    this.#part("times").textContent = `${count(tokens, "token")} in ${showTime(ms)}`;
  }
}
