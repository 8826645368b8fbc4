"""Child process of the demo: imports modules and renders their pages with `pydoc`.

Reads module names from standard input, one a line, and writes one JSON object a line to standard output: the name and
its HTML, or the name and the error. Importing other people's modules may print, open windows or exit; so this runs
apart from the user's process, with its output streams redirected, no browser and no display.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pydoc
import sys
import warnings
import webbrowser


def render(name: str) -> str:
    """The HTML page of a module, as `python -m pydoc -w` would write it."""
    module = importlib.import_module(name)
    title = pydoc.describe(module)
    return pydoc.html.page(title, pydoc.html.document(module, name))


def main() -> None:
    """Renders until standard input ends. One failure is one line; the rest goes on."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", errors="backslashreplace")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    webbrowser.open = lambda *_args, **_options: False
    warnings.simplefilter("ignore")
    for line in io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8"):
        name = line.strip()
        answers.write(json.dumps({"begin": name}) + "\n")
        answers.flush()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                answer = {"name": name, "html": render(name)}
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # modules may raise SystemExit or worse on import; that is their answer
                answer = {"name": name, "error": f"{type(error).__name__}: {error}"[:300]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
