// The link that reproduces a run: settings in the URL's fragment. Pure.
//
// #prompt=...&api=chat&rule=fly&fly_window_size=6&num_speculative_tokens=15&seed=5&rounds=0.15x3.7
//     &model=...&texts=plain-rule

const MOST_ROUNDS = 1_000_000;

/**
 * Encodes the K of each round: runs of equal numbers as `15x3`, joined by dots.
 */
export function encodeRounds(rounds) {
  const runs = [];
  for (const k of rounds) {
    if (runs.at(-1)?.k === k) runs.at(-1).times += 1;
    else runs.push({ k, times: 1 });
  }
  return runs.map(({ k, times }) => (times > 1 ? `${k}x${times}` : `${k}`)).join(".");
}

/** Decodes them. Returns null for text that is no list of rounds. */
export function decodeRounds(text) {
  const rounds = [];
  for (const run of text.split(".")) {
    const found = /^(\d{1,5})(?:x(\d{1,6}))?$/.exec(run);
    if (!found || rounds.length + Number(found[2] ?? 1) > MOST_ROUNDS) return null;
    for (let times = Number(found[2] ?? 1); times > 0; times -= 1) rounds.push(Number(found[1]));
  }
  return rounds;
}

/**
 * Encodes settings, an object of strings, and a run: {rounds, model, texts}. API keys are no settings.
 */
export function encodeLink(settings, run) {
  const fragment = new URLSearchParams();
  for (const name of Object.keys(settings).sort()) {
    if (settings[name] !== "") fragment.set(name, settings[name]);
  }
  if (run.rounds.length) fragment.set("rounds", encodeRounds(run.rounds));
  fragment.set("model", run.model);
  fragment.set("texts", run.texts.map(digest).join("-"));
  return `#${fragment}`;
}

/** Decodes a fragment. Returns {settings, run} or null; `run.texts` are digests. */
export function decodeLink(fragment) {
  const { rounds = "", model = "", texts = "", ...settings } = Object.fromEntries(
    new URLSearchParams(fragment.replace(/^#/, "")),
  );
  if (!("prompt" in settings)) return null;
  const run = { rounds: rounds ? decodeRounds(rounds) : [], model, texts: texts.split("-") };
  return { settings, run };
}

/** Returns a short digest of a text (FNV-1a of 32 bits): for comparison, not for security. */
export function digest(text) {
  let hash = 0x811c9dc5;
  for (const byte of new TextEncoder().encode(text)) hash = Math.imul(hash ^ byte, 0x01000193);
  return (hash >>> 0).toString(16).padStart(8, "0");
}
