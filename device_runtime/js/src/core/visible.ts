/** Untrusted text made visible: nothing in it moves a cursor, hides, or reverses the text around it. As in Python. */

// Controls, overrides of direction, spaces but the plain one, and letters and marks that have no width or no ink.
const UNSEEN =
  /(?! )[\p{C}\p{Z}\u115f\u1160\u2800\u3164\uffa0]|\u034f|[\u17b4-\u17b5]|[\u180b-\u180d]|\u180f|[\ufe00-\ufe0f]|[\u{e0100}-\u{e01ef}]/gu;

/** A text as one line that is safe to show: all but letters, marks, numbers, signs and plain spaces is escaped as in
 * JSON.
 *
 * A JSON document keeps its meaning.
 */
export function visible(text: string): string {
  return text.replace(UNSEEN, (letter) => letter.split("").map(escaped).join(""));
}

function escaped(unit: string): string {
  return `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`;
}
