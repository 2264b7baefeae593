"""The web page of devices, built, and what a person does there."""

import subprocess
import time

import numpy as np

from tests.device_runtime.node import command

DIGIT_ROWS = {
    0: ["..####..", ".#....#.", ".#....#.", ".#....#.", ".#....#.", ".#....#.", ".#....#.", "..####.."],
    1: ["...#....", "..##....", "...#....", "...#....", "...#....", "...#....", "...#....", "..###..."],
    7: [".#####..", "....#...", "....#...", "...#....", "..###...", "..#.....", "..#.....", "..#....."],
}


def build(folder):
    """Build the page into a folder."""
    subprocess.run(command("page/build.ts", folder), check=True)
    return folder


class Person:
    """Somebody at the page of a population, in a browser."""

    def __init__(self, browser, url, population):
        self.browser = browser
        self.url = f"{url}/page/?population={population}"

    def open(self):
        self.browser.get(self.url)
        self.sees("state", "Ready")

    def text(self, name):
        return self.browser.execute_script("return document.getElementById(arguments[0])?.textContent ?? ''", name)

    def sees(self, name, words, within_s=60):
        """Wait until an element shows the words."""
        until = time.monotonic() + within_s
        while words not in self.text(name):
            assert time.monotonic() < until, f"{name} shows {self.text(name)!r}, never {words!r}"
            time.sleep(0.05)

    def press(self, name):
        self.browser.execute_script("document.getElementById(arguments[0]).click()", name)

    def draw(self, digit):
        """Draw a digit by pointer, and keep it."""
        before = int(self.text("count"))
        box = self.browser.execute_script(
            "const pad = document.getElementById('pad'); pad.scrollIntoView({block: 'center'});"
            "document.getElementById('digit').value = arguments[0];"
            "const {left, top, width} = pad.getBoundingClientRect(); return [left, top, width / 8]",
            str(digit),
        )
        for row, line in enumerate(DIGIT_ROWS[digit]):
            for column, ink in enumerate(line):
                if ink == "#":
                    self._tap(box[0] + (column + 0.5) * box[2], box[1] + (row + 0.5) * box[2])
        self.press("keep")
        self.sees("count", str(before + 1))

    def _tap(self, x, y):
        for kind in ("mousePressed", "mouseReleased"):
            event = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1, "pointerType": "pen"}
            self.browser.execute_cdp_cmd("Input.dispatchMouseEvent", event)

    def examples(self):
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
        kept = self.browser.execute_async_script(script)
        x = np.array([ink for ink, _ in kept], np.float32).reshape(-1, 1, 8, 8)
        return {"x": x, "y": np.array([label for _, label in kept], np.int64)}
