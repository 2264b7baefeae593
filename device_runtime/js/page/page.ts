/** The page by which a person takes part: what it shows, and what its buttons do. */

import { visible } from "../src/core/bytes.ts";
import { policyOf } from "../src/core/permission/policy.ts";
import { BrowserDevice, type BrowserModel, type Ending, type Owner, type Waking, waking } from "../src/web/device.ts";
import { Pad } from "./drawing.ts";
import { ending, entry, read, size, unread } from "./words.ts";

const COLLECTION = "default";
const SHAPE = [1, 8, 8];
const DIGITS = Array.from({ length: 10 }, (_, digit) => digit);
/** The name under which an operator releases the model that reads digits. */
const MODEL = "digits";
const DAY_S = 86_400;
const RULES = ["onBattery", "onMetered", "whileClosed"] as const;
/** The settings at first. signers: who may release plans of secure rounds, as the link says. */
const standard = (signers: readonly string[]): Owner => ({
  policy: { signers, require_secure_aggregation: signers.length > 0, per_day: { sessions: 100 } },
  rules: { onBattery: true, onMetered: false, whileClosed: false },
  retention: { maxAgeS: 30 * DAY_S, most: 1000 },
});
/** The whole link with which the person took part last is stored, because an installed page starts without a query. */
const REMEMBERED = "muster-link";
const SHOWN = 20;
const TAKES_PART = "Taking part: it waits to be chosen for a round, and then trains.";
const DRAW_FIRST = "Taking part, but there is nothing to train on yet: draw and keep one digit at least, better ten.";
const NOTICES: Record<Parameters<BrowserDevice["onnotice"]>[0], string> = {
  stop: "Stopped for a moment: another page of this site changes what is kept here.",
  settings: "Another page of this site changed your rules.",
  left: "Another page of this site left, or deleted what was kept here.",
};

const WHEN: Record<Waking, string> = {
  never: "It works only while this page is open: keep it in front, or in a tab.",
  "once-installed":
    "It works only while this page is open. Once you install it as an app, by your browser's menu, it may work while it " +
    "is closed too.",
  now: "It works only while this page is open, unless your rules say otherwise.",
};
const WAKES =
  "It works while this page is open. While it is closed, your browser may wake it for some minutes, twice a day at most. " +
  "Pause ends both.";

const element = <T extends HTMLElement>(id: string) => document.getElementById(id) as T;
const button = (id: string) => element<HTMLButtonElement>(id);

function say(text: string, kind: "good" | "bad" | "" = ""): void {
  element("state").textContent = text;
  element("state").className = `live ${kind}`;
}

/** Do what a button asks, and say why it failed. */
function doing(work: () => Promise<unknown>): () => void {
  return () => {
    work().catch((error: unknown) => say(`${error instanceof Error ? error.message : String(error)}.`, "bad"));
  };
}

async function start(): Promise<void> {
  if (window.top !== window.self) return say("Another site shows this page inside its own: open it by itself.", "bad");
  const link = givenLink();
  const population = link.get("population");
  if (population === null) {
    return say("This address names no population: ask for the whole link, which ends in ?population=…", "bad");
  }
  if (!isSecureContext) {
    return say("A browser holds keys only for pages that come by https: ask for a link that begins with it.", "bad");
  }
  const coordinator = coordinatorIn(link);
  if (!known().includes(coordinator.href)) {
    return say(`This link leads to ${coordinator.host}, but this page only to ${known().join(" and ")}.`, "bad");
  }
  element("population").textContent = visible(population);
  element("host").textContent = coordinator.host;
  const before = remembered();
  if (before !== null && targetOf(before) !== targetOf(link)) {
    element("before").textContent = `“${visible(before.get("population")!)}” at ${coordinatorIn(before).host}`;
    element("other-target").hidden = false;
  }
  const owner = standard(link.getAll("signer"));
  const [worker, background] = ["worker.js", "background.js"].map((name) => new URL(name, location.href));
  const device = await BrowserDevice.open(coordinator, population, owner, { worker: worker!, background: background! });
  element("may-vanish").hidden = (await navigator.storage.persist?.()) === true;
  new Page(device, link);
  await navigator.serviceWorker.register("service-worker.js");
}

/** The link of this address, or the remembered one where it has none. */
function givenLink(): URLSearchParams {
  const given = new URLSearchParams(location.search);
  return given.has("population") ? given : (remembered() ?? given);
}

/** The link with which the person took part last; null if there is none, or this page no longer works with it. */
function remembered(): URLSearchParams | null {
  const link = new URLSearchParams(localStorage.getItem(REMEMBERED) ?? "");
  return link.has("population") && known().includes(coordinatorIn(link).href) ? link : null;
}

/** The coordinators that this page names or, where it names none, the one that serves it. */
function known(): readonly string[] {
  const named = document.querySelector<HTMLMetaElement>("meta[name=coordinators]")!.content;
  return named === "" ? [new URL("..", location.href).href] : named.split(" ");
}

function coordinatorIn(link: URLSearchParams): URL {
  return new URL(link.get("coordinator") ?? known()[0]!, location.href);
}

/** The coordinator and population of a link. Links that differ only in signers are for the same device. */
function targetOf(link: URLSearchParams): string {
  return `${coordinatorIn(link)} ${link.get("population")}`;
}

/** The page with its device. */
class Page {
  readonly #device: BrowserDevice;
  readonly #link: URLSearchParams;
  readonly #pad: Pad;
  readonly #model: BrowserModel;
  /** What reads now, and before: one digit after the other. */
  #reading: Promise<void> = Promise.resolve();
  /** Whether to ask for a newer model before the next reading. Who left is not known to the coordinator any more. */
  #asks = true;
  #left = false;

  constructor(device: BrowserDevice, link: URLSearchParams) {
    this.#device = device;
    this.#link = link;
    this.#pad = new Pad(element("pad"));
    this.#model = device.model(MODEL);
    element("digits").append(...DIGITS.map((digit) => this.#keepButton(digit)));
    this.#pad.onchange = () => {
      for (const digit of DIGITS) button(`keep-${digit}`).disabled = this.#pad.isEmpty;
    };
    this.#pad.onstroke = () => this.#read();
    device.onending = (ended) => this.#ended(ended);
    device.onnotice = (notice) => this.#changedElsewhere(notice);
    button("wipe").onclick = () => this.#wipe();
    button("take-part").onclick = doing(() => this.#takePart());
    button("pause").onclick = doing(() => this.#pause());
    button("leave").onclick = doing(() => this.#leave());
    button("erase").onclick = doing(() => this.#erase());
    button("take-signers").onclick = doing(() => this.#takeSigners());
    element<HTMLFormElement>("owner").onchange = doing(() => this.#change());
    this.#fillRules();
    this.#show("Ready: draw some digits, then take part.");
    doing(() => this.#showKept())();
  }

  async #takePart(): Promise<void> {
    localStorage.setItem(REMEMBERED, this.#link.toString());
    element("other-target").hidden = true;
    this.#left = false;
    await this.#device.takePart();
    const { count } = await this.#device.examples.load(COLLECTION);
    if (this.#device.takesPart) this.#show(count === 0 ? DRAW_FIRST : TAKES_PART);
  }

  async #pause(): Promise<void> {
    await this.#device.pause();
    this.#show("Paused.");
  }

  #keepButton(digit: number): HTMLButtonElement {
    const made = document.createElement("button");
    made.id = `keep-${digit}`;
    made.textContent = String(digit);
    made.ariaLabel = `Keep it as ${digit}`;
    made.disabled = true;
    made.onclick = doing(() => this.#keep(digit));
    return made;
  }

  async #keep(digit: number): Promise<void> {
    await this.#device.examples.add(COLLECTION, {
      x: { shape: SHAPE, values: this.#pad.levels },
      y: { shape: [], values: new BigInt64Array([BigInt(digit)]) },
    });
    this.#wipe();
    await this.#showKept();
  }

  #wipe(): void {
    this.#pad.wipe();
    this.#asks = true;
  }

  /** Have the model read what is on the pad, after what it reads now. */
  #read(): void {
    this.#reading = this.#reading.then(async () => {
      if (this.#pad.isEmpty) return;
      const text = await this.#readNow().catch(unread);
      if (!this.#pad.isEmpty) element("reading").textContent = text;
    });
  }

  async #readNow(): Promise<string> {
    const asks = this.#asks && !this.#left && !this.#device.takesPart; // sessions ask when they end
    this.#asks = false;
    const asked = asks ? await this.#model.refresh().then(() => "", unread) : "";
    const outputs = await this.#model.predict({ x: this.#pad.levels }).catch((error: unknown) => {
      throw asked === "" ? error : new Error(asked);
    });
    return read(outputs.output);
  }

  async #leave(): Promise<void> {
    this.#left = true;
    await this.#device.leave();
    this.#show("You left: this device's keys are gone.");
    await this.#showKept();
  }

  async #erase(): Promise<void> {
    if (!confirm("Delete your examples, the journal and this device's keys?")) return;
    this.#left = true;
    await this.#device.erase();
    if (targetOf(remembered() ?? this.#link) === targetOf(this.#link)) localStorage.removeItem(REMEMBERED);
    this.#fillRules();
    this.#show("Everything is deleted.");
    await this.#showKept();
  }

  async #change(): Promise<void> {
    const form = element<HTMLFormElement>("owner");
    if (!form.reportValidity()) return;
    const said = new FormData(form);
    await this.#device.change({
      policy: {
        ...this.#device.owner.policy,
        require_secure_aggregation: said.has("secure"),
        per_day: { sessions: Number(said.get("sessions")) },
      },
      rules: Object.fromEntries(RULES.map((rule) => [rule, said.has(rule)])) as Record<(typeof RULES)[number], boolean>,
      retention: { ...this.#device.owner.retention, maxAgeS: DAY_S * Number(said.get("days")) },
    });
    element("rules-state").textContent = "Kept.";
  }

  /** Use the signers of the link instead of the kept ones. */
  async #takeSigners(): Promise<void> {
    const { owner } = this.#device;
    const { policy } = standard(this.#link.getAll("signer"));
    const { signers, require_secure_aggregation } = policyOf(policy);
    await this.#device.change({ ...owner, policy: { ...owner.policy, signers, require_secure_aggregation } });
    this.#fillRules();
  }

  #changedElsewhere(notice: keyof typeof NOTICES): void {
    this.#fillRules();
    this.#left ||= notice === "left";
    this.#show(this.#device.takesPart ? TAKES_PART : NOTICES[notice]);
    doing(() => this.#showKept())();
  }

  #fillRules(): void {
    const { policy, rules, retention } = this.#device.owner;
    const { require_secure_aggregation, per_day, signers } = policyOf(policy);
    const said = this.#link.getAll("signer");
    element("signers").textContent = signers.map(visible).join(" or ") || "anybody";
    element("other-signers").hidden = said.length === 0 || said.toSorted().join() === signers.toSorted().join();
    const { elements } = element<HTMLFormElement>("owner");
    const field = (name: string) => elements.namedItem(name) as HTMLInputElement;
    field("secure").checked = require_secure_aggregation;
    field("sessions").value = String(per_day.sessions ?? "");
    for (const rule of RULES) field(rule).checked = rules[rule];
    field("days").value = String(retention.maxAgeS / DAY_S);
  }

  #ended(ended: Ending): void {
    const { text, kind } = ending(ended);
    this.#show(text, kind);
    this.#read();
    doing(() => this.#showKept())();
  }

  #show(text: string, kind: "good" | "bad" | "" = ""): void {
    say(text, kind);
    button("take-part").disabled = this.#device.takesPart;
    button("pause").disabled = !this.#device.takesPart;
    button("leave").disabled = button("erase").disabled = false;
    doing(() => this.#showWhen())();
  }

  async #showWhen(): Promise<void> {
    const [can, wakes] = [await waking(), await this.#device.worksWhileClosed()];
    element("while-closed").hidden = can !== "now";
    element("when").textContent = wakes ? WAKES : WHEN[can];
    button("pause").disabled = !(this.#device.takesPart || wakes);
  }

  /** Show examples, plan and journal as they are kept. */
  async #showKept(): Promise<void> {
    const { count, columns } = await this.#device.examples.load(COLLECTION);
    const labels = [...(columns.get("y")?.values ?? [])].map(Number);
    const kinds = [...new Set(labels)]
      .sort()
      .map((digit) => `${labels.filter((one) => one === digit).length} × ${digit}`);
    element("count").textContent = String(count);
    element("kinds").textContent = kinds.length === 0 ? "" : `: ${kinds.join(", ")}`;
    const plan = await this.#device.lastPlan();
    if (plan !== null) {
      const { purpose, name, parameters, reportBytes } = plan;
      element("purpose").textContent = visible(purpose);
      element("claim").hidden = purpose === "";
      element("plan").textContent =
        `“${visible(name)}”: a model of ${parameters.toLocaleString()} numbers, trained on your examples. ` +
        `A report has ${size(reportBytes)}.`;
    }
    const sent = (await this.#device.journal()).filter(({ bytes_up }) => bytes_up > 0);
    const entries = sent.slice(-SHOWN).reverse();
    if (entries.length > 0) element("entries").replaceChildren(...entries.map((one) => row(entry(one))));
  }
}

function row(cells: readonly string[]): HTMLTableRowElement {
  const made = document.createElement("tr");
  for (const text of cells) made.insertCell().textContent = text;
  return made;
}

doing(start)();
