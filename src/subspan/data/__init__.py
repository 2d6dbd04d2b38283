"""Real models and data without the network.

Submodules load on first use: finding an asset needs neither torch nor datasets.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subspan.data.assets import ASSETS, Asset, ModelSource, asset_path, find_asset, installed, model_source
    from subspan.data.expression import Expression, golub, leukemia_all
    from subspan.data.fields import read_fields
    from subspan.data.graphs import Graph, blogcatalog, contextual_sbm, digits_graphs, homophilous_edges
    from subspan.data.images import DomainShift, Images, digits, digits_domain_shift, mnist5k
    from subspan.data.models import load_pretrained
    from subspan.data.neural import CountTrials, LatentSeries, MotorCortex, lorenz_thomas, motor_cortex, rotating_counts
    from subspan.data.pde import DarcyFlow, DarcyGenerator, NavierStokesGenerator, Vorticity
    from subspan.data.refusals import TOPICS, Request, topic_requests
    from subspan.data.sentence import SentenceClassifier, classifier_class
    from subspan.data.shared import shared_file
    from subspan.data.synthetic import MisalignedMap, misaligned_linear_map
    from subspan.data.tables import NumberTable, iterate_rows, read_numbers
    from subspan.data.text import (
        Labels,
        Splits,
        guess_column,
        limit_words,
        load_reviews,
        load_text,
        pick_columns,
        split_data,
    )

_HOMES = {
    "assets": ("ASSETS", "Asset", "ModelSource", "asset_path", "find_asset", "installed", "model_source"),
    "expression": ("Expression", "golub", "leukemia_all"),
    "fields": ("read_fields",),
    "graphs": ("Graph", "blogcatalog", "contextual_sbm", "digits_graphs", "homophilous_edges"),
    "images": ("DomainShift", "Images", "digits", "digits_domain_shift", "mnist5k"),
    "models": ("load_pretrained",),
    "neural": ("CountTrials", "LatentSeries", "MotorCortex", "lorenz_thomas", "motor_cortex", "rotating_counts"),
    "refusals": ("TOPICS", "Request", "topic_requests"),
    "sentence": ("SentenceClassifier", "classifier_class"),
    "shared": ("shared_file",),
    "pde": ("DarcyFlow", "DarcyGenerator", "NavierStokesGenerator", "Vorticity"),
    "synthetic": ("MisalignedMap", "misaligned_linear_map"),
    "tables": ("NumberTable", "iterate_rows", "read_numbers"),
    "text": (
        "Labels",
        "Splits",
        "guess_column",
        "limit_words",
        "load_reviews",
        "load_text",
        "pick_columns",
        "split_data",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ASSETS",
    "TOPICS",
    "Asset",
    "CountTrials",
    "DarcyFlow",
    "DarcyGenerator",
    "DomainShift",
    "Expression",
    "Graph",
    "Images",
    "Labels",
    "LatentSeries",
    "MisalignedMap",
    "ModelSource",
    "MotorCortex",
    "NavierStokesGenerator",
    "NumberTable",
    "Request",
    "SentenceClassifier",
    "Splits",
    "Vorticity",
    "asset_path",
    "blogcatalog",
    "classifier_class",
    "contextual_sbm",
    "digits",
    "digits_domain_shift",
    "digits_graphs",
    "find_asset",
    "golub",
    "guess_column",
    "homophilous_edges",
    "installed",
    "iterate_rows",
    "leukemia_all",
    "limit_words",
    "load_pretrained",
    "load_reviews",
    "load_text",
    "lorenz_thomas",
    "misaligned_linear_map",
    "mnist5k",
    "model_source",
    "motor_cortex",
    "pick_columns",
    "read_fields",
    "read_numbers",
    "rotating_counts",
    "shared_file",
    "split_data",
    "topic_requests",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
