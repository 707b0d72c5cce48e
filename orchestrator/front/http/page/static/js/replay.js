// The clock of a replay: play, pause, seek, at a chosen speed.

const FIT_MS = 6000;

export class Replay {
  #duration = 0;
  #now = 0;
  #speed = "fit";
  #frame = 0;
  #onTick;
  #onEnd;

  /** `onTick(ms)` whenever the clock moves, `onEnd()` when it reaches the end. */
  constructor(onTick, onEnd) {
    this.#onTick = onTick;
    this.#onEnd = onEnd;
  }

  load(duration) {
    this.pause();
    this.#duration = duration;
    this.#now = 0;
  }

  get duration() {
    return this.#duration;
  }

  get now() {
    return this.#now;
  }

  get playing() {
    return this.#frame !== 0;
  }

  /** Milliseconds of the recording per millisecond of the replay. */
  get factor() {
    return this.#speed === "fit" ? Math.max(this.#duration, 1) / FIT_MS : Number(this.#speed);
  }

  set speed(speed) {
    this.#speed = speed;
  }

  play() {
    this.pause();
    if (this.#now >= this.#duration) this.#now = 0;
    let before = performance.now();
    const step = (now) => {
      this.#frame = requestAnimationFrame(step);
      this.#move(this.#now + Math.max(0, now - before) * this.factor);
      before = now;
    };
    this.#frame = requestAnimationFrame(step);
  }

  pause() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
  }

  seek(ms) {
    this.pause();
    this.#move(ms);
  }

  skip() {
    this.seek(this.#duration);
  }

  #move(ms) {
    this.#now = Math.min(ms, this.#duration);
    this.#onTick(this.#now);
    if (this.#now < this.#duration) return;
    this.pause();
    this.#onEnd();
  }
}
