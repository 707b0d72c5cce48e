// Rounds as bars (uPlot), and as a table.

import { byId, colorOf, count, make, number } from "./dom.js";
import { describeRound, inOneLine, stepsOf } from "./describe.js";

const FATES = ["exact", "loose", "rolledBack", "rejected", "unreached"]; // from the bottom up
const COLORS = {
  exact: "exact-model", loose: "loose", rolledBack: "rolled-back", rejected: "rejected", unreached: "unreached",
};
const HEIGHT = 225;
const NARROWEST = 5; // pixels per bar; wider charts scroll
const WIDEST = 16_000; // pixels of a canvas

/** Fills a rectangle of a canvas: each fate has a pattern besides its colour. */
function paint(context, fate, color, x, y, width, height) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.fillStyle = context.strokeStyle = color;
  context.lineWidth = 2 * devicePixelRatio;
  const step = 5 * devicePixelRatio;
  if (fate === "exact" || fate === "rejected") context.fillRect(x, y, width, height);
  if (fate === "rejected") {
    context.globalCompositeOperation = "destination-out";
    context.lineWidth = devicePixelRatio;
    for (let at = y - (y % step); at < y + height; at += step) line(context, x, at, x + width, at);
  }
  if (fate === "loose" || fate === "rolledBack") {
    for (let at = x - height - (x % step); at < x + width; at += step) line(context, at, y + height, at + height, y);
  }
  if (fate === "rolledBack") {
    for (let at = x - (x % step); at < x + width + height; at += step) line(context, at, y + height, at - height, y);
  }
  if (fate === "unreached") {
    context.globalAlpha = 0.35;
    context.fillRect(x, y, width, height);
  }
  if (fate === "loose") context.strokeRect(x, y, width, height);
  context.restore();
}

/** Marks a bar's drafter below it: the first has a line, the second dots, the third dashes, ... */
function paintDrafter(context, drafter, color, x, y, width) {
  context.save();
  context.strokeStyle = color;
  context.lineWidth = 3 * devicePixelRatio;
  context.setLineDash([[], [2, 2], [6, 3], [6, 2, 2, 2]][drafter % 4].map((length) => length * devicePixelRatio));
  line(context, x, y, x + width, y);
  context.restore();
}

function line(context, ...[x0, y0, x1, y1]) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

/** Groups rounds into bars {first, last}: one per round with drafts, one per stretch of plain rounds. */
export function barsOf(rounds) {
  const bars = [];
  for (const { index, drafted } of rounds) {
    const before = bars.at(-1);
    if (drafted === 0 && before && rounds[before.last].drafted === 0) before.last = index;
    else bars.push({ first: index, last: index });
  }
  return bars;
}

export class Rounds {
  #root = byId("rounds-chart");
  #recording = null;
  #bars = [];
  #plot = null;
  #drafters = [];
  #selected = null;
  #onPoint;

  /** `onPoint(bar, description, rect)` when a bar is pointed at; bar null: none is. */
  constructor(onPoint) {
    this.#onPoint = onPoint;
    this.#root.addEventListener("keydown", (event) => this.#onKey(event));
    this.#root.addEventListener("blur", () => this.#select(null));
    document.documentElement.addEventListener("themechange", () => this.#draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
    new ResizeObserver(() => this.#plot?.setSize(this.#size)).observe(this.#root);
    this.#paintSwatches();
  }

  get #size() {
    const wished = Math.min(WIDEST, this.#bars.length * NARROWEST + 60);
    return { width: Math.max(this.#root.clientWidth, wished), height: HEIGHT };
  }

  /** Shows a recording's rounds; `adapts`: its K did. */
  load(recording, adapts) {
    this.#recording = recording;
    this.#bars = barsOf(recording.rounds);
    this.#selected = null;
    const drafted = recording.rounds.filter((round) => round.drafted);
    const total = (...names) => number(drafted.reduce((sum, round) => sum + names.reduce((all, name) => all + round[name], 0), 0));
    const plainSteps = recording.steps - drafted.length;
    const drafters = [...new Set(drafted.map((round) => round.drafter || "prompt lookup"))];
    byId("rounds-summary").textContent = drafted.length
      ? `${count(drafted.length, "round")} with drafts: ${total("drafted")} drafted by ${drafters.join(", ")}, ` +
        `${total("exact", "loose")} accepted (${total("loose")} loosely), ${total("rolledBack")} rolled back; ` +
        `${count(plainSteps, "step")} without drafts. Point at a bar, or use the arrow keys.`
      : `No drafts: ${count(plainSteps, "step")} of plain decoding${adapts ? ", since drafts promised no gain" : ""}.`;
    byId("rounds-details").hidden = recording.rounds.length === 0;
    this.#drafters = drafters;
    this.#fillTable(recording);
    this.#showDrafters();
    Object.assign(this.#root, { tabIndex: 0, role: "slider", ariaLabel: "Rounds, one after the other" });
    Object.assign(this.#root, { ariaValueMin: 1, ariaValueMax: Math.max(1, this.#bars.length) });
    this.#tellValue(0);
    this.#draw();
  }

  #tellValue(place) {
    this.#root.ariaValueNow = place + 1;
    if (this.#bars[place]) this.#root.ariaValueText = inOneLine(describeRound(this.#recording, this.#bars[place]));
  }

  /** Adds the drafters' marks to the legend, if there are several. */
  #showDrafters() {
    const legend = byId("fates");
    for (const item of legend.querySelectorAll(".of-drafter")) item.remove();
    if (this.#drafters.length < 2) return;
    const items = this.#drafters.map((name, place) => {
      const canvas = make("canvas", { className: "swatch", width: 36, height: 24, ariaHidden: "true", data: { drafter: place } });
      return make("li", { className: "of-drafter" }, canvas, `by ${name}`);
    });
    legend.append(...items);
  }

  #fillTable({ rounds }) {
    const cells = (bar) => {
      const round = rounds[bar.first];
      const name = bar.first === bar.last ? `${bar.first + 1}` : `${bar.first + 1}–${bar.last + 1}`;
      const drafter = round.drafted ? round.drafter || "prompt lookup" : "plain decoding";
      const numbers = ["drafted", "exact", "loose", "rejected", "unreached", "rolledBack"].map((key) => round[key]);
      return [name, drafter, ...numbers, rounds[bar.last].ms.toFixed(1)];
    };
    byId("rounds-table").tBodies[0].replaceChildren(
      ...this.#bars.map((bar) => make("tr", {}, ...cells(bar).map((text) => make("td", { textContent: text })))),
    );
  }

  #paintSwatches() {
    for (const canvas of document.querySelectorAll(".swatch")) {
      const { fate, drafter } = canvas.dataset;
      const context = canvas.getContext("2d");
      context.clearRect(0, 0, canvas.width, canvas.height);
      if (fate) paint(context, fate, colorOf(COLORS[fate]), 0, 0, canvas.width, canvas.height);
      else paintDrafter(context, Number(drafter), colorOf("ink"), 0, canvas.height / 2, canvas.width);
    }
  }

  #draw() {
    this.#paintSwatches();
    this.#plot?.destroy();
    this.#plot = null;
    if (!this.#bars.length) return;
    const xs = this.#bars.map((_, place) => place);
    const heights = this.#bars.map(({ first }) => this.#recording.rounds[first].drafted);
    const most = Math.max(...heights, 1);
    const quiet = colorOf("quiet");
    const font = "12px system-ui, sans-serif";
    const grid = { stroke: colorOf("line"), width: 1 };
    this.#plot = new uPlot(
      {
        ...this.#size, legend: { show: false },
        cursor: { x: false, y: false, drag: { x: false, y: false }, points: { show: false } },
        scales: { x: { time: false, range: [-0.6, xs.length - 0.4] }, y: { range: [0, most * 1.04] } },
        axes: [
          {
            stroke: quiet, font, grid: { show: false }, ticks: { show: false }, size: 26, label: "round", labelSize: 16, labelFont: font, labelGap: 0,
            incrs: [1, 2, 5, 10, 20, 50, 100, 500],
            values: (_, splits) => splits.map((at) => (this.#bars[at] ? this.#bars[at].first + 1 : "")),
          },
          {
            stroke: quiet, font, grid, ticks: { show: false }, size: 30, incrs: [1, 2, 5, 10],
            label: "tokens drafted", labelSize: 16, labelFont: font, labelGap: 0,
          },
        ],
        series: [{}, { paths: () => null, points: { show: false } }],
        hooks: { draw: [(plot) => this.#paintBars(plot)], setCursor: [(plot) => this.#onCursor(plot)] },
      },
      [xs, heights],
      this.#root,
    );
  }

  #paintBars(plot) {
    const colors = Object.fromEntries(FATES.map((fate) => [fate, colorOf(COLORS[fate])]));
    const [plain, quiet, ink] = ["plain", "quiet", "ink"].map(colorOf);
    const slot = plot.valToPos(1, "x", true) - plot.valToPos(0, "x", true);
    const width = Math.max(1, Math.min(slot * 0.78, 34 * devicePixelRatio));
    const context = plot.ctx;
    this.#bars.forEach((bar, place) => {
      const round = this.#recording.rounds[bar.first];
      const left = plot.valToPos(place, "x", true) - width / 2;
      let base = plot.valToPos(0, "y", true);
      let sum = 0;
      for (const fate of FATES) {
        if (!round[fate]) continue;
        sum += round[fate];
        const top = plot.valToPos(sum, "y", true);
        paint(context, fate, colors[fate], left, top, width, base - top);
        base = top;
      }
      if (round.drafted && this.#drafters.length > 1) {
        const drafter = this.#drafters.indexOf(round.drafter || "prompt lookup");
        paintDrafter(context, drafter, ink, left, plot.valToPos(0, "y", true) + 3 * devicePixelRatio, width);
      }
      if (round.drafted) return;
      const height = 5 * devicePixelRatio;
      context.fillStyle = plain;
      context.fillRect(left, base - height, width, height);
      const steps = stepsOf(this.#recording, bar);
      if (steps === 1 || slot < 18 * devicePixelRatio) return;
      context.fillStyle = quiet;
      context.textAlign = "center";
      context.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
      context.fillText(`×${steps}`, left + width / 2, base - height - 4 * devicePixelRatio);
    });
  }

  /** Marks the slot of a bar; null: none. */
  #mark(place) {
    const mark = this.#plot.over.querySelector(".slot") ?? make("div", { className: "slot" });
    this.#plot.over.append(mark);
    mark.hidden = place === null;
    if (place === null) return;
    const [left, right] = [place - 0.5, place + 0.5].map((at) => this.#plot.valToPos(at, "x"));
    mark.style.left = `${left}px`;
    mark.style.width = `${right - left}px`;
  }

  #rectOf(place) {
    const area = this.#plot.over.getBoundingClientRect();
    const at = area.left + this.#plot.valToPos(place, "x");
    return { left: at, top: area.top + 20, bottom: area.bottom };
  }

  #onCursor(plot) {
    const place = plot.cursor.left >= 0 ? plot.cursor.idx : null;
    if (place === null || place === undefined) {
      if (this.#selected !== null) return;
      if (this.#plot) this.#mark(null);
      this.#onPoint(null);
      return;
    }
    this.#point(place);
  }

  #point(place) {
    const bar = this.#bars[place];
    this.#mark(place);
    this.#onPoint(bar, describeRound(this.#recording, bar), this.#rectOf(place));
  }

  #onKey(event) {
    const last = this.#bars.length - 1;
    if (last < 0) return;
    const at = this.#selected ?? -1;
    const target = {
      ArrowRight: Math.min(at + 1, last), ArrowUp: Math.min(at + 1, last), ArrowLeft: Math.max(at - 1, 0),
      ArrowDown: Math.max(at - 1, 0), Home: 0, End: last,
    }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    this.#select(target);
  }

  #select(place) {
    this.#selected = place;
    if (place !== null && this.#plot) {
      const at = this.#plot.valToPos(place, "x");
      this.#root.scrollLeft = Math.max(0, at - this.#root.clientWidth / 2);
    }
    if (place === null) {
      if (this.#plot) this.#mark(null);
      return this.#onPoint(null);
    }
    this.#tellValue(place);
    this.#point(place);
  }
}
