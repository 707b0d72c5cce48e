// The drafters: health and share, and the switch for who holds the admin key.

import { byId, make } from "./dom.js";
import { request } from "./stream.js";

const percent = (fraction) => `${Math.round(100 * fraction)} %`;

export class Drafters {
  #generateKey;
  #adminKey;
  #onList;

  /** The keys are functions; `onList(names)` gets the drafters' names. */
  constructor(generateKey, adminKey, onList) {
    this.#generateKey = generateKey;
    this.#adminKey = adminKey;
    this.#onList = onList;
    byId("refresh-drafters").addEventListener("click", () => this.refresh());
  }

  /** Asks for the drafters again; what goes wrong is said below the table. */
  async refresh() {
    try {
      const key = this.#adminKey() || this.#generateKey();
      const list = await (await request("v1/drafters", { key })).json();
      this.show(list.data, list.administers);
      const refused = this.#adminKey() && !list.administers;
      byId("drafters-message").textContent = refused ? "This admin key does not have the scope admin." : "";
    } catch (error) {
      byId("drafters-message").textContent = error.message;
    }
  }

  show(drafters, administers = false) {
    this.#onList(drafters.map((drafter) => drafter.name));
    const canaries = drafters.reduce((sum, { share }) => sum + share, 0);
    const rows = drafters.map((drafter) =>
      this.#row({ ...drafter, share: drafter.active ? 1 - canaries : drafter.share }, administers),
    );
    const nothing = make("tr", {}, make("td", { colSpan: 8, textContent: "No drafters: only prompt lookup by the orchestrator." }));
    byId("drafters").tBodies[0].replaceChildren(...(rows.length ? rows : [nothing]));
  }

  #row(drafter, administers) {
    const { stats, model } = drafter;
    const ready = drafter.replicas?.filter((replica) => replica.ready).length;
    const health = drafter.usable ? "usable" : "not usable";
    const of = drafter.replicas ? ` (${ready} of ${drafter.replicas.length})` : "";
    const reason = drafter.usable ? null : make("span", { className: "reason", textContent: drafter.reason ?? "" });
    const size = model?.num_parameters ? `, ${(model.num_parameters / 1e6).toPrecision(3)} M` : "";
    const button = make("button", {
      type: "button", className: "plain-button", textContent: "Activate", disabled: !drafter.usable || drafter.share === 1,
      ariaLabel: `Activate ${drafter.name}`,
    });
    button.addEventListener("click", () => this.#activate(drafter.name));
    const cells = [
      make("td", {}, make("b", { textContent: drafter.name })),
      make("td", { textContent: `${drafter.kind}${size}${drafter.translated ? ", translated" : ""}` }),
      make("td", {}, make("span", { className: drafter.usable ? "up" : "down", textContent: health + of }), reason),
      make("td", { textContent: drafter.state.toLowerCase() }),
      make("td", { textContent: percent(drafter.share) }),
      make("td", { textContent: stats?.num_draft_tokens ? percent(stats.draft_acceptance_rate) : "–" }),
      make("td", { textContent: stats ? `${stats.active_generations}` : "–" }),
      make("td", {}, administers ? button : null),
    ];
    return make("tr", { data: { name: drafter.name, state: drafter.state } }, ...cells);
  }

  async #activate(name) {
    const share = byId("share").value;
    const message = byId("drafters-message");
    try {
      const path = `v1/drafters/${encodeURIComponent(name)}/activate`;
      await request(path, { method: "POST", key: this.#adminKey(), body: share ? { share: Number(share) } : {} });
      await this.refresh();
      message.textContent = share
        ? `${name} gets ${percent(Number(share))} of the new generations.`
        : `${name} is the active drafter; running generations move to it at their next round.`;
    } catch (error) {
      message.textContent = error.message;
    }
  }
}
