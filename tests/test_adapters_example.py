"""`examples/adapters.py`: adapters shrink what travels each round by far, and the rest travels once."""

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "adapters.py"


def test_adapters_shrink_the_rounds_of_the_emnist_cnn_twenty_times(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    whole, adapted = ([int(word.replace(",", "")) for word in line.split()[1:]] for line in printed.splitlines()[1:])
    assert whole == [4 * 1_206_590, 0]
    assert adapted == [4 * (4 * (9216 + 128) + 129 * 62), 4 * (1_206_590 - 129 * 62)]
    assert whole[0] > 20 * adapted[0]
