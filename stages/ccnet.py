"""CCNet's own models, scored as CCNet's code scores them: `perplexity: {model: <folder>, compat: ccnet}`.

The folder holds, for each language, `<language>.arpa.bin` (KenLM) and `<language>.sp.model` (SentencePiece) as
cc_net/perplexity.py names them, and, where buckets are wanted, `cutoff.csv`: a row a percentile, a column a language.

Kept as in the code (facebookresearch/cc_net, text_normalizer.py and perplexity.py): a document is normalised in one
call, which removes newlines as control characters and glues the words on both sides, and is then one line of
SentencePiece pieces. Perplexity = 10 ^ (-log10 p / (pieces + 1)). A document without text has 10 ^ (-log10 p(</s>)).
"""

from __future__ import annotations

import csv
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import sentencepiece

from gristmill.stages.kernels.normalise import PUNCTUATION
from gristmill.stages.kneser_ney import ModelError, load_arpa
from gristmill.stages.loading import loaded_once

_NOT_PRINTING = re.compile("[" + "".join(map(chr, [*range(32), *range(127, 160)])) + "]")
_DIGIT = re.compile(r"\d")
_PUNCTUATION = str.maketrans({**PUNCTUATION, "１": '"'})


def normalise(text: str) -> str:
    """text_normalizer.normalize of cc_net, with its defaults."""
    text = text.strip().lower()
    text = "".join(c for c in unicodedata.normalize("NFD", text) if unicodedata.category(c) != "Mn")
    return _NOT_PRINTING.sub("", _DIGIT.sub("0", text).translate(_PUNCTUATION))


@dataclass(frozen=True)
class CCNetModel:
    """A pair of SentencePiece and KenLM models of one language."""

    model: Any  # kenlm.Model
    pieces: Any  # sentencepiece.SentencePieceProcessor
    percentiles: np.ndarray  # (n,) perplexities, ascending; empty without cutoff.csv
    places: np.ndarray  # (n,) the percentile of each

    def perplexities(self, texts: pa.Array) -> np.ndarray:
        """(n,) strings -> (n,) float64."""
        out = np.empty(len(texts))
        for i, text in enumerate(texts.to_pylist()):
            pieces = self.pieces.encode(normalise(text), out_type=str)
            out[i] = 10.0 ** (-self.model.score(" ".join(pieces)) / (len(pieces) + 1))
        return out


@loaded_once(4)
def load_pairs(folder: str) -> Mapping[str, CCNetModel]:
    """The models of a folder, by language. Once a process. Raises ModelError where there are none."""
    found = sorted(Path(folder).glob("*.arpa.bin"))
    pairs = {path: path.with_name(path.name.removesuffix(".arpa.bin") + ".sp.model") for path in found}
    if not pairs:
        raise ModelError(f"{folder} holds no <language>.arpa.bin; `compat: ccnet` needs CCNet's pairs of models.")
    cutoffs = _cutoffs(Path(folder) / "cutoff.csv")
    models = {}
    for path, pieces_path in pairs.items():
        if not pieces_path.is_file():
            raise ModelError(f"{pieces_path} is missing; without it the text cannot be cut as {path.name} expects.")
        language = path.name.removesuffix(".arpa.bin")
        places, percentiles = cutoffs.get(language, (np.zeros(0), np.zeros(0)))
        try:
            pieces = sentencepiece.SentencePieceProcessor(model_file=str(pieces_path))
        except RuntimeError as error:
            raise ModelError(f"{pieces_path}: SentencePiece cannot read this model: {error}") from error
        models[language] = CCNetModel(load_arpa(path), pieces, percentiles, places)
    return models


def _cutoffs(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """language -> (percentiles, perplexities) of CCNet's table; empty where there is none."""
    if not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        return {}
    index, *languages = rows[0]
    try:
        places = np.array([float(row[index]) for row in rows])
        return {language: (places, np.array([float(row[language]) for row in rows])) for language in languages}
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"{path} is not a table of numbers, a row a percentile and a column a language: {error}"
        ) from error
