/** The worker of a model on a page: it answers questions, and opens the model with the first. */

import { UNKNOWN } from "../core/conditions.ts";
import { DeviceError } from "../core/errors.ts";
import { Model } from "../core/model.ts";
import type { Columns, Inputs } from "../core/model-version.ts";
import { policyOf } from "../core/permission/policy.ts";
import { openDatabase } from "./database.ts";
import { stoppedBy } from "./endings.ts";
import type { Owner } from "./owner.ts";
import { alone } from "./pages.ts";
import { webPlatform } from "./platform.ts";
import type { Target } from "./target.ts";

/** A question about a model: its outputs for rows, or without rows, whether a refresh replaced its version. */
export interface Question extends Target {
  readonly id: number;
  readonly model: string;
  readonly owner: Owner;
  readonly rows: Inputs | null;
}

/** The answer to the question with this id: outputs, whether the version was replaced, or what went wrong. */
export type Answer = { readonly id: number } & (
  | { readonly outputs: Columns }
  | { readonly swapped: boolean }
  | { readonly reason: string; readonly detail: string }
);

let model: Promise<Model> | undefined;

/** Answer a question. What is no error of a device is a crash. */
export async function answer(question: Question): Promise<void> {
  const { id, rows } = question;
  let said: Answer;
  try {
    model ??= open(question).catch((error: unknown) => {
      model = undefined; // the next question tries again
      throw error;
    });
    const opened = await model;
    await opened.reload(console.warn); // the worker of sessions may have taken another version
    said = rows === null ? { id, swapped: await opened.refresh() } : { id, outputs: await opened.predict(rows) };
  } catch (error) {
    if (!(error instanceof DeviceError)) throw error;
    said = { id, ...stoppedBy(error).stopped };
  }
  self.postMessage(said);
}

async function open(question: Question): Promise<Model> {
  const { coordinator, population, owner } = question;
  const platform = webPlatform(await openDatabase(question), owner.retention, owner.rules, () => UNKNOWN);
  const place = { coordinator: new URL(coordinator), population, policy: policyOf(owner.policy) };
  return Model.open(platform, place, question.model, (work) => alone(question, work), console.warn);
}
