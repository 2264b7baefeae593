"""The web page of devices, built, and what a browser keeps for it."""

import subprocess

import numpy as np

from tests.device_runtime.node import command

ROWS = {
    1: ["...#....", "..##....", "...#....", "...#....", "...#....", "...#....", "...#....", "..###..."],
    7: [".#####..", "....#...", "....#...", "...#....", "..###...", "..#.....", "..#.....", "..#....."],
}
DIGITS = {digit: np.array([list(row) for row in rows]) == "#" for digit, rows in ROWS.items()}


def build(folder):
    """Build the page into a folder."""
    subprocess.run(command("page/build.ts", folder), check=True)
    return folder


def kept_examples(browser):
    """The examples that the page keeps, as fields of arrays."""
    script = """
    const done = arguments[0];
    const opening = indexedDB.open("muster");
    opening.onsuccess = () => {
      const all = opening.result.transaction("examples").objectStore("examples").getAll();
      all.onsuccess = () => {
        opening.result.close();
        done(all.result.map(({ fields }) => [[...fields.x.values], Number(fields.y.values[0])]));
      };
    };"""
    kept = browser.execute_async_script(script)
    x = np.array([ink for ink, _ in kept], np.float32).reshape(-1, 1, 8, 8)
    return {"x": x, "y": np.array([label for _, label in kept], np.int64)}
