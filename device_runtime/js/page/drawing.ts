/** The drawing pad: 8 × 8 cells of ink, by pointer or by keyboard. */

/** A place on the pad, in cells from its upper left corner. */
type Place = readonly [row: number, column: number];

const SIDE = 8;
/** Ink beside a stroke, as a scanned digit has. */
const BESIDE = 0.3;
const STEPS: Record<string, readonly [number, number]> = {
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
};

/** A pad inside an element. */
export class Pad {
  /** Hears of every change. */
  onchange: () => void = () => {};
  /** Hears of the end of every stroke. */
  onstroke: () => void = () => {};
  #pen: Place | null = null;
  readonly #levels = new Float32Array(SIDE * SIDE);
  readonly #cells: HTMLElement[] = [];
  readonly #root: HTMLElement;

  constructor(root: HTMLElement) {
    this.#root = root;
    for (let row = 0; row < SIDE; row++) {
      const line = root.appendChild(document.createElement("div"));
      line.role = "row";
      for (let column = 0; column < SIDE; column++) {
        const cell = line.appendChild(document.createElement("div"));
        cell.role = "gridcell";
        cell.tabIndex = this.#cells.length === 0 ? 0 : -1;
        cell.ariaLabel = `row ${row + 1}, column ${column + 1}`;
        this.#cells.push(cell);
      }
    }
    root.addEventListener("pointerdown", (event) => {
      root.setPointerCapture(event.pointerId);
      this.#pen = null;
      this.#strokeTo(event);
    });
    root.addEventListener("pointermove", (event) => {
      if (root.hasPointerCapture(event.pointerId)) this.#strokeTo(event);
    });
    root.addEventListener("lostpointercapture", () => this.onstroke());
    root.addEventListener("keydown", (event) => this.#key(event));
    this.#show();
  }

  /** The ink of every cell, from 0 to 1, row by row; a copy. */
  get levels(): Float32Array<ArrayBuffer> {
    return this.#levels.slice();
  }

  get isEmpty(): boolean {
    return this.#levels.every((level) => level === 0);
  }

  wipe(): void {
    this.#levels.fill(0);
    this.#show();
  }

  /** Ink every cell from the last place of the pen to this one: a fast finger is seen at few places. */
  #strokeTo({ clientX, clientY }: PointerEvent): void {
    const { left, top, width, height } = this.#root.getBoundingClientRect();
    const [row, column] = [(SIDE * (clientY - top)) / height, (SIDE * (clientX - left)) / width];
    const [fromRow, fromColumn] = this.#pen ?? [row, column];
    const steps = Math.max(1, Math.ceil(2 * Math.max(Math.abs(row - fromRow), Math.abs(column - fromColumn))));
    for (let step = 1; step <= steps; step++) {
      const part = step / steps;
      this.#ink(Math.floor(fromRow + part * (row - fromRow)), Math.floor(fromColumn + part * (column - fromColumn)));
    }
    this.#pen = [row, column];
    this.#show();
  }

  #ink(row: number, column: number): void {
    for (const [down, right] of [[0, 0], ...Object.values(STEPS)] as (readonly [number, number])[]) {
      const [y, x] = [row + down, column + right];
      if (y < 0 || x < 0 || y >= SIDE || x >= SIDE) continue;
      const place = SIDE * y + x;
      this.#levels[place] = Math.max(this.#levels[place]!, down === 0 && right === 0 ? 1 : BESIDE);
    }
  }

  #key(event: KeyboardEvent): void {
    const place = this.#cells.indexOf(event.target as HTMLElement);
    const [row, column] = [Math.floor(place / SIDE), place % SIDE];
    const step = STEPS[event.key];
    if (place < 0 || (step === undefined && event.key !== " ")) return;
    event.preventDefault();
    if (step === undefined) {
      this.#ink(row, column);
      this.#show();
      this.onstroke();
      return;
    }
    const [y, x] = [row + step[0], column + step[1]];
    const next = y < 0 || x < 0 || y >= SIDE || x >= SIDE ? undefined : this.#cells[SIDE * y + x];
    if (next === undefined) return;
    this.#cells[place]!.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  #show(): void {
    this.#cells.forEach((cell, place) => {
      cell.style.setProperty("--level", String(this.#levels[place]));
      cell.ariaSelected = String(this.#levels[place]! >= 0.5);
    });
    this.onchange();
  }
}
