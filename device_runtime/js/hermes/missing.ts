/** What Hermes alone lacks and React Native adds: text encodings, base64, async iterators. For the virtual machine. */

const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

class Utf8Encoder {
  encode(text: string): Uint8Array {
    return Uint8Array.from(unescape(encodeURIComponent(text)), (letter) => letter.charCodeAt(0));
  }
}

class Utf8Decoder {
  decode(data: Uint8Array): string {
    let letters = "";
    for (const byte of data) letters += String.fromCharCode(byte);
    return decodeURIComponent(escape(letters));
  }
}

function btoa(bytes: string): string {
  let letters = "";
  for (let at = 0; at < bytes.length; at += 3) {
    const [a, b, c] = [at, at + 1, at + 2].map((place) => bytes.charCodeAt(place) || 0) as [number, number, number];
    const four = [a >> 2, ((a & 3) << 4) | (b >> 4), ((b & 15) << 2) | (c >> 6), c & 63].map((six) => LETTERS[six]);
    letters += four.join("").slice(0, Math.min(4, bytes.length - at + 1));
  }
  return letters.padEnd(4 * Math.ceil(letters.length / 4), "=");
}

function atob(letters: string): string {
  const sixes = [...letters.replace(/=+$/, "")].map((letter) => LETTERS.indexOf(letter));
  let bytes = "";
  for (let at = 1; at < sixes.length; at++) {
    const [before, here, shift] = [sixes[at - 1]!, sixes[at]!, 2 * (at % 4)];
    if (shift > 0) bytes += String.fromCharCode(((before << shift) | (here >> (6 - shift))) & 255);
  }
  return bytes;
}

const missing = { TextEncoder: Utf8Encoder, TextDecoder: Utf8Decoder, btoa, atob };
for (const [name, value] of Object.entries(missing)) {
  if (!(name in globalThis)) Object.assign(globalThis, { [name]: value });
}
Object.assign(Symbol, { asyncIterator: Symbol.asyncIterator ?? Symbol("asyncIterator") });
