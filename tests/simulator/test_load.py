"""Light devices speak the real protocol, and what goes wrong with some of them stalls no round."""

import os
import threading
import time

import pytest

from benchmarks.options import RoundsOptions
from benchmarks.rounds import run
from benchmarks.soak import slope_per_hour
from benchmarks.usage import Usage, main_thread_s


@pytest.mark.promise("Silent devices, and devices that die during an upload, stall no round")
def test_round_with_silent_and_dying_devices_is_won_at_its_first_attempt():
    result = run(RoundsOptions(devices=25, size=50, silent=0.08, killed=0.2), lambda *_: None)
    assert result.sound
    assert [(one.assigned, one.reported) for one in result.rounds] == [(25, 18)]
    assert result.endings["reported"] == 18
    assert result.endings["killed"] == 5
    assert result.server_peak_mb > result.server_idle_mb > 20
    assert result.server_cpu_s > 0


def test_slope_is_that_of_the_time_after_the_warm_up():
    growing = [(float(second), 50.0 + (second if second < 200 else 200 + second / 60)) for second in range(1000)]
    assert abs(slope_per_hour(growing) - 60) < 1e-6


def test_usage_of_a_process_is_that_of_the_system():
    used, spent = Usage.of(os.getpid()), sum(os.times()[:2])
    assert abs(used.cpu_s - spent) < 0.2
    assert 0 < used.rss_mb <= used.peak_rss_mb
    assert used.descriptors >= 3


def test_cpu_of_the_main_thread_leaves_out_that_of_others():
    began, mine = main_thread_s(os.getpid()), time.thread_time()
    other = threading.Thread(target=lambda: sum(range(10_000_000)))
    other.start()
    other.join()
    sum(range(1_000_000))
    used = main_thread_s(os.getpid()) - began
    assert used == pytest.approx(time.thread_time() - mine, abs=0.05)
