#!/bin/sh
# Says what the machine lacks, before anything is installed. Usage: check_machine.sh PYTHON
python=${1:-python3}
missing=""
if ! command -v "$python" >/dev/null 2>&1; then
    missing="$missing\n  Python 3.11 or newer ($python was not found)   apt-get install python3"
else
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        missing="$missing\n  Python 3.11 or newer ($python is $("$python" -c 'import platform; print(platform.python_version())'))"
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        missing="$missing\n  Python's venv module                           apt-get install python3-venv"
    "$python" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' ||
        missing="$missing\n  Python's headers                               apt-get install python3-dev"
fi
if ! command -v c++ >/dev/null 2>&1 && ! command -v g++ >/dev/null 2>&1 && ! command -v clang++ >/dev/null 2>&1; then
    missing="$missing\n  a C++ compiler (kenlm is compiled here)        apt-get install g++"
fi
if [ -n "$missing" ]; then
    printf "This machine lacks:$missing\nInstall it and run the same command again.\n" >&2
    exit 2
fi
