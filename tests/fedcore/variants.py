"""Every algorithm with settings that reach all of its code: what holds for any algorithm is tested on each of them."""

from fedcore.algorithms.fed_adagrad import FedAdagrad
from fedcore.algorithms.fed_adam import FedAdam
from fedcore.algorithms.fed_avg import FedAvg
from fedcore.algorithms.fed_avg_m import FedAvgM
from fedcore.algorithms.fed_buff import FedBuff
from fedcore.algorithms.fed_dual_avg import FedDualAvg
from fedcore.algorithms.fed_lamb import FedLamb
from fedcore.algorithms.fed_lars import FedLARS
from fedcore.algorithms.fed_nova import FedNova
from fedcore.algorithms.fed_pa import FedPA
from fedcore.algorithms.fed_prox import FedProx
from fedcore.algorithms.fed_sgd import FedSGD
from fedcore.algorithms.fed_yogi import FedYogi
from fedcore.algorithms.local_ada_alter import LocalAdaAlter
from fedcore.algorithms.mime_lite import MimeLite
from fedcore.algorithms.norm_fed_avg import NormFedAvg

LOCAL = {"client_lr": 0.2, "epochs": 2, "batch_size": 4}

MIME = {"client_lr": 0.3, "epochs": 2, "batch_size": 4}

AVERAGING = [
    FedAvg(**LOCAL),
    FedAvg(**LOCAL, server_lr=0.7, weighting="uniform"),
    FedAvg(**LOCAL | {"client_lr": 0.05}, client_optimizer="momentum"),
    FedAvg(**LOCAL, client_optimizer="momentum", client_beta1=0.4, weighting="uniform"),
    FedAvg(**LOCAL, client_optimizer="adam"),
    FedAvg(**LOCAL, client_optimizer="adam", client_beta1=0.5, client_beta2=0.7, client_epsilon=0.1),
    FedSGD(batch_size=4),
    FedSGD(batch_size=4, server_momentum=0.6, weighting="uniform"),
    FedProx(**LOCAL, mu=0.5),
    FedProx(**LOCAL, mu=0.3, server_momentum=0.4, server_lr=0.5, weighting="examples"),
    FedProx(**LOCAL, mu=0.3, client_optimizer="momentum", client_beta1=0.3),
    FedNova(**LOCAL | {"client_lr": 0.1}),
    FedNova(**LOCAL | {"client_lr": 0.1}, client_momentum=0.6),
    FedNova(**LOCAL | {"client_lr": 0.1}, mu=0.8, weighting="uniform"),
    FedNova(**LOCAL | {"client_lr": 0.1}, mu=0.8, client_momentum=0.6, server_momentum=0.4, server_lr=0.5),
    NormFedAvg(**LOCAL),
    NormFedAvg(**LOCAL, server_lr=1.5, weighting="uniform"),
    FedBuff(**LOCAL),
    FedBuff(**LOCAL, server_lr=0.4, weighting="examples", client_optimizer="momentum"),
]
SERVER_OPTIMIZERS = [
    FedAvgM(**LOCAL, server_lr=0.3),
    FedAvgM(**LOCAL, momentum=0.5, nesterov=True, weighting="uniform"),
    FedAdagrad(**LOCAL),
    FedAdagrad(**LOCAL, server_lr=0.3, beta1=0.8, tau=0.1, form="released", weighting="uniform"),
    FedYogi(**LOCAL),
    FedYogi(**LOCAL, server_lr=0.3, beta1=0.5, beta2=0.6, tau=0.1, form="released", weighting="uniform"),
    FedAdam(**LOCAL),
    FedAdam(**LOCAL, server_lr=0.5, beta1=0.5, tau=0.1, weighting="uniform"),
    FedAdam(**LOCAL, server_lr=0.5, beta1=0.5, tau=0.1, form="released"),
    FedAdam(**LOCAL, server_lr=0.5, beta1=0.5, tau=0.1, form="keras"),
    FedAdam(**LOCAL, server_lr=0.5, beta1=0.5, tau=0.1, form="torch"),
    FedLARS(**LOCAL),
    FedLARS(**LOCAL, server_lr=0.3, momentum=0.5, weight_decay=0.1, epsilon=0.2, weighting="uniform"),
    FedLamb(**LOCAL),
    FedLamb(**LOCAL, server_lr=0.3, beta1=0.5, weight_decay=0.1, epsilon=0.2, weighting="uniform"),
]
MIMES = [
    MimeLite(**MIME),
    MimeLite(**MIME, server_lr=0.5, weighting="examples"),
    MimeLite(**MIME | {"client_lr": 0.02}, optimizer="adam"),
    MimeLite(**MIME | {"client_lr": 0.02}, optimizer="adagrad", initial_v=0.1),
]
POSTERIOR = [
    FedPA(client_lr=0.1, batch_size=4, samples=4, steps_per_sample=3, burn_in_steps=2, rho=0.4),
    FedPA(
        client_lr=0.2, batch_size=4, samples=2, burn_in_steps=0, burn_in_rounds=2, server_lr=0.5, server_momentum=0.3
    ),
    FedPA(client_lr=0.1, batch_size=4, samples=1, weighting="uniform"),
]
DUAL_AVERAGING = [
    FedDualAvg(client_lr=0.2, batch_size=4, steps=4, l1=0.3),
    FedDualAvg(client_lr=0.2, batch_size=4, steps=3, l1=0.1, server_lr=0.5, weighting="examples"),
]
VARIANTS = [*AVERAGING, *SERVER_OPTIMIZERS, *MIMES, *POSTERIOR, *DUAL_AVERAGING, LocalAdaAlter(epochs=2, batch_size=4)]
