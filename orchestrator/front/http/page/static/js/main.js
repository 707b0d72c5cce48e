// Puts the page's parts together: the form starts a race, the race is replayed, judged and linked.

import { Card } from "./card.js";
import { Runner } from "./course.js";
import { describeToken, inOneLine } from "./describe.js";
import { announce, byId, count, make, showTime } from "./dom.js";
import { Drafters } from "./drafters.js";
import { factsOf, repetitionOf } from "./facts.js";
import { keyField } from "./keys.js";
import { Knobs } from "./knobs.js";
import { Lane } from "./lanes.js";
import { decodeLink, encodeLink } from "./link.js";
import { Replay } from "./replay.js";
import { runRace } from "./race.js";
import { Rounds } from "./rounds.js";
import { judgeRace } from "./verdict.js";

const SIDES = ["plain", "rule"];
const DRAW_MS = 200;
const LOST = "The target is lost. The stream waits until it is back.";
const data = JSON.parse(byId("page-data").textContent);
const labels = Object.fromEntries(data.origins.map(({ name, label }) => [name, label]));
const root = document.documentElement;
const calm = matchMedia("(prefers-reduced-motion: reduce)");

const card = new Card();
const runners = Object.fromEntries(SIDES.map((side) => [side, new Runner(byId(`runner-${side}`))]));
const lanes = Object.fromEntries(
  SIDES.map((side) => [side, new Lane(byId(`lane-${side}`), (...pointed) => onToken(side, ...pointed))]),
);
const rounds = new Rounds(onBar);
const replay = new Replay(onTick, onEnd);
const knobs = new Knobs(data.rules, onSettings);
const generateKey = keyField("api-key", meet);
const adminKey = keyField("admin-key", () => drafters.refresh());
const drafters = new Drafters(generateKey, adminKey, (names) => knobs.offerDrafters(names));

let linked = null; // {settings, run}: what the page's link asks to be repeated
let running = null; // the AbortController of the race in progress
let race = null; // {plain, rule, ratios, verdict, settings, repeated}

const stateIs = (state) => (root.dataset.state = state);

// --- a race -----------------------------------------------------------------------------------

async function start() {
  const settings = knobs.read();
  const seed = settings.seed === undefined ? Math.floor(Math.random() * 2 ** 31) : Number(settings.seed);
  const setup = knobs.setupOf(settings, seed);
  const repeated = repeatedBy(settings);
  if (repeated) setup.speculation.rule.num_draft_tokens_per_round = repeated.rounds;
  running = new AbortController();
  race = null;
  replay.pause();
  card.hide();
  for (const id of ["problem", "link-row"]) byId(id).hidden = true;
  byId("controls").disabled = true;
  byId("verdict").textContent = "";
  byId("link-note").textContent = "";
  for (const side of SIDES) {
    runners[side].begin("waiting");
    lanes[side].begin();
  }
  byId("race-button").textContent = "Stop";
  try {
    const options = { key: generateKey(), signal: running.signal };
    const recorded = await runRace(setup, watchers(settings), options);
    show({ ...recorded, settings: { ...settings, seed: String(seed) }, repeated });
  } catch (error) {
    fail(error);
  } finally {
    running = null;
    byId("race-button").textContent = "Race";
    drafters.refresh();
  }
}

/** Watches the recordings; draws seldom, since the server may need the cores that drawing takes. */
function watchers(settings) {
  let due = null;
  const draw = () => {
    if (due === null) return;
    const [side, recording] = due;
    due = null;
    if (!running || root.dataset.state !== `recording-${side}`) return;
    runners[side].progress(recording);
    lanes[side].progress(recording);
  };
  return {
    begin(side, turn) {
      const name = side === "plain" ? "plain decoding" : settings.rule;
      stateIs(`recording-${side}`);
      lanes[side].begin();
      if (turn || side === "rule") runners[side === "rule" ? "plain" : "rule"].state = "recorded";
      runners[side].begin("recording");
      const which = turn ? `, run ${turn + 1}` : "";
      byId("facts").textContent = `Recording ${name}${which}. The replay follows.`;
      if (!turn) announce(`Recording ${name}.`);
    },
    progress(side, recording) {
      if (due === null) setTimeout(draw, DRAW_MS);
      due = [side, recording];
    },
    done(side, recording) {
      due = null;
      runners[side].progress(recording);
      lanes[side].progress(recording);
    },
    silent(side, seconds, ready) {
      lanes[side].silent(seconds, ready);
      if (!ready && byId("announcer").textContent !== LOST) announce(LOST);
    },
  };
}

function fail(error) {
  stateIs(error.name === "AbortError" ? "idle" : "failed");
  for (const side of SIDES) runners[side].begin("");
  byId("facts").textContent = error.name === "AbortError" ? "Stopped." : "";
  if (error.name === "AbortError") return;
  let message = error.message;
  if (error.status === 401) {
    byId("api-key-row").hidden = false;
    byId("api-key").focus();
    if (!generateKey()) message = "There is no API key yet: this server asks for one; type it at the top of the page.";
  } else if (error.status === undefined) console.error(error);
  byId("problem").hidden = false;
  byId("problem").textContent = message;
}

function show(recorded) {
  const { plain, rule, settings, ratios } = recorded;
  const verdict = judgeRace(plain, rule, settings.prompt, ratios);
  race = { ...recorded, verdict };
  SIDES.forEach((side, place) => {
    runners[side].load(race[side], race[SIDES[1 - place]]);
    lanes[side].load(race[side], verdict.marks[place]);
  });
  rounds.load(rule, settings.num_speculative_tokens === "auto");
  showLegend();
  showLink();
  byId("controls").disabled = false;
  byId("facts").textContent = `Both are recorded: replaying them on one clock.`;
  replay.load(Math.max(plain.ms, rule.ms));
  if (calm.matches) replay.skip();
  else play();
}

// --- the replay -------------------------------------------------------------------------------

function play() {
  stateIs("replaying");
  byId("verdict").textContent = "";
  byId("pause").textContent = "Pause";
  byId("skip").disabled = false;
  replay.play();
}

function onTick(ms) {
  for (const side of SIDES) {
    runners[side].showUntil(ms);
    lanes[side].showUntil(ms);
  }
  byId("clock").value = (1000 * ms) / Math.max(1, replay.duration);
  byId("clock").ariaValueText = showTime(ms);
  const slower = 1 / replay.factor;
  const pace = slower > 1.05 ? `${slower.toFixed(slower < 10 ? 1 : 0)} times slower`
    : slower < 0.95 ? `${(1 / slower).toFixed(1)} times faster` : "as it was";
  byId("clock-text").textContent = `${showTime(ms)}, ${pace}`;
}

function onEnd() {
  stateIs("finished");
  byId("skip").disabled = true;
  byId("pause").textContent = "Play";
  const { speed, loss, outcome, agree, sentence } = race.verdict;
  byId("verdict").replaceChildren(
    `${speed}, ${loss}, `, make("span", { className: agree ? "" : "bad", textContent: outcome }), ".",
  );
  byId("facts").textContent = factsOf(race);
  for (const side of SIDES) lanes[side].scrollToTop();
  announce(`${sentence}.`);
}

function showLegend() {
  const counts = { differs: race.verdict.marks[1].filter(Boolean).length };
  for (const { origin } of race.rule.tokens) counts[origin] = (counts[origin] ?? 0) + 1;
  for (const item of document.querySelectorAll("#legend li")) {
    item.querySelector(".count").textContent = counts[item.dataset.origin] ?? "";
  }
}

// --- what is pointed at -----------------------------------------------------------------------

function onToken(side, index, element, byKey) {
  if (!race || index === null) {
    card.hide(side);
    if (race) lanes[side].markRound(race[side], null);
    return;
  }
  const description = describeToken(race[side], index, { labels, measure: knobs.measureOf(race.settings) });
  card.show(side, description, element.getBoundingClientRect());
  lanes[side].markRound(race[side], race[side].tokens[index].draft === null ? null : race[side].tokens[index].round);
  if (byKey) announce(inOneLine(description));
}

function onBar(bar, description, rect) {
  if (!race || bar === null) {
    card.hide(rounds);
    if (race) lanes.rule.markRound(race.rule, null);
    return;
  }
  card.show(rounds, description, rect);
  lanes.rule.markRound(race.rule, race.rule.rounds[bar.first].drafted ? bar.first : null);
}

// --- links and settings -----------------------------------------------------------------------

/** Returns the linked run if these are its settings. */
function repeatedBy(settings) {
  return linked && JSON.stringify(sorted(settings)) === JSON.stringify(sorted(linked.settings)) ? linked.run : null;
}

const sorted = (object) => Object.entries(object).sort(([a], [b]) => (a < b ? -1 : 1));

function showLink() {
  const { plain, rule, settings, repeated } = race;
  const texts = [plain.text, rule.text];
  const run = { rounds: rule.numDraftTokensPerRound, model: rule.model, texts };
  const fragment = encodeLink({ ...settings, repeats: "" }, run);
  history.replaceState(null, "", fragment);
  linked = decodeLink(fragment);
  byId("link").value = location.href;
  byId("link-row").hidden = false;
  if (repeated) byId("link-note").textContent = repetitionOf(race, repeated);
}

function openLink() {
  linked = decodeLink(location.hash);
  if (!linked) return;
  const missing = knobs.write(linked.settings);
  linked.settings = missing.length ? null : knobs.read();
  onSettings();
  if (linked.run.rounds === null) missing.push("rounds that can be read");
  byId("facts").textContent = missing.length
    ? `The link asks for what is not here: ${missing.join(", ")}.`
    : "The link's settings are in place. Press Race to repeat its run, with the same K in each round.";
  if (missing.length) linked = null;
}

function onSettings() {
  const { rule } = knobs.read();
  const k = byId("k-auto").checked ? "as many drafts per step as pay off" : `up to ${count(Number(byId("k").value), "draft")} per step`;
  runners.rule.name = rule;
  byId("prompt").classList.toggle("code", byId("api").value === "completions");
  byId("lead-rule").textContent = rule;
  byId("rule-note").textContent = k;
}

/** Learns what only holders of a key are told; a link may name some of it. */
async function meet() {
  await drafters.refresh();
  await listModels();
  if (data.keys_required && !race && !running) openLink();
}

async function listModels() {
  if (data.model) return;
  try {
    const response = await fetch("v1/models", { headers: { authorization: `Bearer ${generateKey()}` } });
    const models = response.ok ? (await response.json()).data : [];
    byId("serves").replaceChildren(...(models.length ? ["serving ", make("b", { textContent: models[0].id })] : []));
    knobs.offerRules(models.slice(1).map((model) => model.rule));
  } catch {} // the race says what is wrong
}

// --- events -----------------------------------------------------------------------------------

byId("race-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else start();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("race-form").requestSubmit();
});
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => {
    byId("prompt").value = example.dataset.prompt;
    byId("api").value = example.dataset.api;
    byId("max-tokens").value = example.dataset.maxTokens;
    byId("k-auto").checked = example.dataset.k === "auto";
    byId("prompt").dispatchEvent(new Event("input", { bubbles: true }));
  });
}
byId("again").addEventListener("click", () => {
  replay.seek(0);
  play();
});
byId("pause").addEventListener("click", () => {
  if (!replay.playing) return play();
  replay.pause();
  byId("pause").textContent = "Play";
});
byId("skip").addEventListener("click", () => replay.skip());
byId("clock").addEventListener("input", () => {
  stateIs("replaying");
  byId("pause").textContent = "Play";
  replay.seek((Number(byId("clock").value) / 1000) * replay.duration);
});
byId("replay-speed").addEventListener("change", () => (replay.speed = byId("replay-speed").value));
byId("copy-link").addEventListener("click", async () => {
  byId("link").select();
  try {
    await navigator.clipboard.writeText(byId("link").value);
    byId("copy-link").textContent = "Copied";
  } catch {
    byId("copy-link").textContent = "Press Ctrl+C";
  }
  setTimeout(() => (byId("copy-link").textContent = "Copy link"), 2000);
});
addEventListener("hashchange", openLink);

if (!data.keys_required) drafters.show(data.drafters);
onSettings();
openLink();
if (!data.keys_required || generateKey() || adminKey()) meet();
