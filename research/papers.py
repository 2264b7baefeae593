"""The papers whose questions the studies ask."""

BONAWITZ = "Bonawitz et al., *Towards federated learning at scale: system design*, MLSys 2019"
CHARLES = "Charles, Garrett, Huo, Shmulyian, Smith, *On large-cohort training for federated learning*, NeurIPS 2021"
COLLINS = (
    "Collins, Hassani, Mokhtari, Shakkottai, *Exploiting shared representations for personalized federated learning*, "
    "ICML 2021"
)
FIELD_GUIDE = "Wang et al., *A field guide to federated optimization*, arXiv:2107.06917, 2021"
HU = "Hu et al., *LoRA: low-rank adaptation of large language models*, ICLR 2022"
KAIROUZ = (
    "Kairouz, McMahan, Song, Thakkar, Thakurta, Xu, *Practical and private (deep) learning without sampling or "
    "shuffling*, ICML 2021"
)
KONECNY_COMMUNICATION = (
    "Konečný, McMahan, Yu, Richtárik, Suresh, Bacon, *Federated learning: strategies for improving communication "
    "efficiency*, arXiv:1610.05492, 2016"
)
PAPAYA = "Huba et al., *Papaya: practical, private, and scalable federated learning*, MLSys 2022"
