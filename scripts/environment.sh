# Sourced by scripts/demo and scripts/test: makes a virtual environment from pinned versions.
#
# environment DIRECTORY REQUIREMENT [PIP_OPTION...]
#   installs this checkout with the extras of REQUIREMENT (".[rtx,compare]") into DIRECTORY,
#   and does nothing when the directory was made from the same pins.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

environment() {
  local directory=$1 stamp
  shift
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Python 3.11 or newer is needed, $python is $("$python" --version); set PYTHON" >&2
    exit 2
  }
  stamp=$(cat "$root/pyproject.toml" "$root"/scripts/constraints*.txt "$root/scripts/environment.sh" |
    cat - <(echo "$root $* $("$python" --version)") | sha256sum)
  if [ "$(cat "$directory/.stamp" 2>/dev/null)" = "$stamp" ]; then return; fi
  echo "== environment $directory: $*"
  rm -rf "$directory"
  "$python" -m venv "$directory"
  "$directory/bin/python" -m pip install -q -c "$root/scripts/constraints.txt" pip
  (cd "$root" && # setuptools warns about every editable install.
    PYTHONWARNINGS=ignore "$directory/bin/python" -m pip install -q -c scripts/constraints.txt "$@")
  echo "$stamp" >"$directory/.stamp"
}
