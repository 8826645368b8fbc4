"""How well the panel of `gristmill mixture suggest` ranks mixtures that it has not seen.

    python benchmarks/suggest.py --corpus DIR [--json]

DIR has the CSV files that sail-sg/regmix publishes (folder data/, MIT licence): {train,test}_mixture_1m.csv and
{train,test}_pile_loss_1m.csv. Fits on the first runs of train, predicts test. Figures are Spearman correlations.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

import numpy as np

from gristmill.mixtures.regressors import fit_panel, predict_as, spearman

PILE_CC = "pile_cc"


def read(path: Path) -> tuple[list[str], np.ndarray]:
    """Column names without the index, and the values (rows, columns)."""
    with path.open(newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    names = [name.removeprefix("metric/the_pile_").removesuffix("_val_loss") for name in head[1:]]
    return names, np.array(rows, np.float64)[:, 1:]


def shares(path: Path) -> np.ndarray:
    """Mixtures (runs, sources), each summing to 1: published ones are rounded to three digits."""
    values = read(path)[1]
    return values / values.sum(1, keepdims=True)


def figures(folder: Path, runs: int, targets: list[str] | None = None) -> dict[str, dict[str, float | str]]:
    """Per target the correlation of each member and of the panel's choice, and its name."""
    train, test = shares(folder / "train_mixture_1m.csv")[:runs], shares(folder / "test_mixture_1m.csv")
    names, losses = read(folder / "train_pile_loss_1m.csv")
    _, truth = read(folder / "test_pile_loss_1m.csv")
    out: dict[str, dict[str, float | str]] = {}
    for column, name in enumerate(names):
        if targets is not None and name not in targets:
            continue
        panel = fit_panel(train, losses[:runs, column])
        row: dict[str, float | str] = {
            member: spearman(truth[:, column], predict_as(panel.members, member, test)) for member in panel.errors
        }
        out[name] = row | {"panel": spearman(truth[:, column], panel.predict(test)), "choice": panel.choice}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--runs", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for runs in arguments.runs:
        found = figures(arguments.corpus, runs)
        values = {name: float(row["panel"]) for name, row in found.items()}
        worst = {
            name: min(float(value) for member, value in row.items() if member not in ("panel", "choice", "mean"))
            for name, row in found.items()
        }
        rows = {
            f"suggest.spearman.{PILE_CC}.{runs}": values[PILE_CC],
            f"suggest.spearman.mean.{runs}": float(np.mean(list(values.values()))),
            f"suggest.choice_minus_worst_member.{runs}": min(values[name] - worst[name] for name in values),
        }
        for bench, value in rows.items():
            figure = {"bench": bench, "value": round(value, 4), "unit": "Spearman"}
            figure |= {"peer": None, "peer_value": None, "ratio": None}
            print(json.dumps(figure) if arguments.json else f"{bench:45} {value:.4f}")
        if not arguments.json:
            for name, row in found.items():
                print(f"  {name:20}", {k: v if isinstance(v, str) else round(v, 3) for k, v in row.items()})


if __name__ == "__main__":
    main()
