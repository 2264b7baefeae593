"""The papers whose questions the studies ask."""

BIAN = (
    "Bian et al., *Mayfly: private aggregate insights from ephemeral streams of on-device user data*, "
    "arXiv:2412.07962, 2024"
)
BONAWITZ = "Bonawitz et al., *Towards federated learning at scale: system design*, MLSys 2019"
CHARLES = "Charles, Garrett, Huo, Shmulyian, Smith, *On large-cohort training for federated learning*, NeurIPS 2021"
COLLINS = (
    "Collins, Hassani, Mokhtari, Shakkottai, *Exploiting shared representations for personalized federated learning*, "
    "ICML 2021"
)
FIELD_GUIDE = "Wang et al., *A field guide to federated optimization*, arXiv:2107.06917, 2021"
HU = "Hu et al., *LoRA: low-rank adaptation of large language models*, ICLR 2022"
KARIMIREDDY = (
    "Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, *SCAFFOLD: stochastic controlled averaging for federated "
    "learning*, ICML 2020"
)
KAIROUZ = (
    "Kairouz, McMahan, Song, Thakkar, Thakurta, Xu, *Practical and private (deep) learning without sampling or "
    "shuffling*, ICML 2021"
)
KONECNY = (
    "Konečný, McMahan, Ramage, Richtárik, *Federated optimization: distributed machine learning for on-device "
    "intelligence*, arXiv:1610.02527, 2016"
)
KONECNY_COMMUNICATION = (
    "Konečný, McMahan, Yu, Richtárik, Suresh, Bacon, *Federated learning: strategies for improving communication "
    "efficiency*, arXiv:1610.05492, 2016"
)
MIME = (
    "Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh, *Breaking the centralized barrier for cross-device "
    "federated learning*, NeurIPS 2021"
)
PAPAYA = "Huba et al., *Papaya: practical, private, and scalable federated learning*, MLSys 2022"
