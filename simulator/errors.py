"""Errors of the simulator.

SimulatorError
├── DatasetError        a data set is unknown, absent, malformed or does not fit the model
├── EngineError         the engine cannot run as asked (no such compute device, cohort larger than the population, …)
├── ProcessDied         a process that computes ended before it answered, such as when the memory was full
├── Diverged            training left the finite numbers
├── StudyError          a study is unknown, or cannot run as asked
├── RunError            a run cannot be started or resumed: its folder exists, is in use, or holds something else
├── RunNotKept          a run could not write to its folder, such as on a full disk
├── FleetError          the fleet of emulated devices cannot run, or stopped making progress
│   └── BrowserMissing  there is no Chromium, or no driver of it
├── ForecastError       a forecast cannot run as asked, or no round of it could ever fill
├── ProfileError        a fleet profile cannot be read, or a kind of device has an unknown key or a bad value
└── SysrootError        the sysroot of emulated ARM devices is missing, or cannot be made here
"""


class SimulatorError(Exception):
    """Base of every error raised by `simulator`."""


class DatasetError(SimulatorError):
    """A data set is unknown, absent, malformed or does not fit the model."""


class EngineError(SimulatorError):
    """The engine cannot run as asked."""


class ForecastError(SimulatorError):
    """A forecast cannot run as asked, or no round of it could ever fill."""


class ProcessDied(SimulatorError):
    """A process that computes ended before it answered."""


class Diverged(SimulatorError):
    """Training left the finite numbers."""


class StudyError(SimulatorError):
    """A study is unknown, or cannot run as asked."""


class RunError(SimulatorError):
    """A run cannot be started or resumed in a folder."""


class RunNotKept(SimulatorError):
    """A run could not write to its folder."""


class FleetError(SimulatorError):
    """The fleet of emulated devices cannot run, or stopped making progress."""


class BrowserMissing(FleetError):
    """There is no Chromium, or no driver of it."""


class ProfileError(SimulatorError):
    """A fleet profile cannot be read, or has an unknown key or a bad value."""


class SysrootError(SimulatorError):
    """The sysroot of emulated ARM devices is missing, or cannot be made here."""
