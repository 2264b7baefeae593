/** The target of a device in a browser: a population of a coordinator. All stored data belongs to one target. */

export interface Target {
  /** The address of the coordinator, as a URL has it in `href`. */
  readonly coordinator: string;
  readonly population: string;
}

/** The name of a target: of its database, its blobs, its lock and its channel. */
export function nameOf({ coordinator, population }: Target): string {
  return `muster ${JSON.stringify([coordinator, population])}`;
}
