"""Personalisation: how much better a model gets on a device by training on the device's own examples.

Wang, Mathews, Kiddon, Eichner, Beaufays, Ramage, "Federated evaluation of on-device personalization", 2019. The device
measures, trains as FedAvg does, and measures again; the trained model never leaves it. With m the device's own mean of
a metric in its range, and x its examples (`fedcore.algorithms.evaluation`):

    on the phone    sums of every metric at the received x
                    y starts at x; for every batch   y −= client_lr · g(y)
                    sums of every metric at y
                    d = m(y) − m(x); x, x²; d, d², d x, d x², d² x² of every metric; 1 where y is better
    on the server   the model stays. Of the sums: the mean gain over devices and over examples with intervals, and the
                    share of devices that gain (`fedcore.algorithms.evaluation`)

A loss is better where it is lower, every other metric where it is higher. Trap: y is measured on the examples that it
was trained on, so a gain says what it learns there. For what it then knows of others, devices hold examples out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.algorithm import Broadcast, Carry, Pass, Report
from fedcore.algorithms.evaluation import MeasuringTwice
from fedcore.algorithms.local_training import LocalSgd
from fedcore.algorithms.settings import count, positive


@dataclass(frozen=True, slots=True)
class Personalisation(MeasuringTwice):
    """Down: d and constants. Up: a few numbers of every metric. Server state: the model, constants.

    client_lr: step size of local training.
    epochs, batch_size: local sweeps and batch size.
    """

    name: ClassVar[str] = "personalisation"

    client_lr: float = positive(0.1)
    epochs: int = count(1)

    @property
    def passes(self) -> tuple[Pass, ...]:
        training = LocalSgd(client_lr=self.client_lr, epochs=self.epochs, batch_size=self.batch_size).training
        return self.measuring("before", "params"), training, self.measuring("after", "train.params")

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        return self.differences(broadcast, carries["before"], carries["after"])
