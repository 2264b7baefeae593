"""The web page of devices, built, and what a browser keeps for it."""

import json
import subprocess
from urllib.parse import parse_qs, urlsplit

import numpy as np

from tests.device_runtime.node import command

ROWS = {
    1: ["...#....", "..##....", "...#....", "...#....", "...#....", "...#....", "...#....", "..###..."],
    7: [".#####..", "....#...", "....#...", "...#....", "..###...", "..#.....", "..#.....", "..#....."],
}
DIGITS = {digit: np.array([list(row) for row in rows]) == "#" for digit, rows in ROWS.items()}


def build(folder, *coordinators):
    """Build the page into a folder, for the coordinators with these URLs, by default for the one that serves it."""
    subprocess.run(command("page/build.ts", folder, *coordinators), check=True)
    return folder


def database(browser):
    """The name of the database of the device that an open page shows, by its link."""
    url = urlsplit(browser.current_url)
    link = parse_qs(url.query)
    target = link.get("coordinator", [f"{url.scheme}://{url.netloc}/"]) + link["population"]
    return f"muster {json.dumps(target, separators=(',', ':'))}"


def kept_examples(browser):
    """The examples that the page keeps, as fields of arrays."""
    script = """
    const [name, done] = arguments;
    const opening = indexedDB.open(name);
    opening.onsuccess = () => {
      const all = opening.result.transaction("examples").objectStore("examples").getAll();
      all.onsuccess = () => {
        opening.result.close();
        done(all.result.map(({ fields }) => [[...fields.x.values], Number(fields.y.values[0])]));
      };
    };"""
    kept = browser.execute_async_script(script, database(browser))
    x = np.array([ink for ink, _ in kept], np.float32).reshape(-1, 1, 8, 8)
    return {"x": x, "y": np.array([label for _, label in kept], np.int64)}
