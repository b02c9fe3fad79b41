#!/usr/bin/env bash
# Builds and tries a release, and publishes nothing: see --help.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'EOF'
usage: scripts/release.sh

Builds the wheel and the sdist of the last commit into dist/, and checks them with twine. Installs
each in an environment of its own, and runs the quick start of README.md there, on threads and under
mpiexec. Prints what is to be uploaded. Publishes nothing.

The version is __version__ of mpishard/__init__.py. CITATION.cff and the first release of
CHANGELOG.md must have the same one.
EOF
}

for argument in "$@"; do
    case "$argument" in
        -h | --help) usage; exit ;;
        *) usage >&2; exit 2 ;;
    esac
done

version="$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$root/mpishard/__init__.py")"
cited="$(sed -n 's/^version: //p' "$root/CITATION.cff")"
logged="$(sed -n 's/^## \[\([0-9][^]]*\)\].*/\1/p' "$root/CHANGELOG.md" | sed -n 1p)"
if [ "$cited" != "$version" ] || [ "$logged" != "$version" ]; then
    refuse "mpishard/__init__.py has version $version, CITATION.cff $cited, CHANGELOG.md $logged: make them equal"
fi
[ -z "$(git -C "$root" status --porcelain)" ] ||
    refuse 'there are changes without a commit, which a release would leave out. See them with' \
        "git -C $root status"

unset PYTHONPATH # the package is to be found where it is installed
base="$(find_python)"
work="$(mktemp -d)"
trap 'rm -rf -- "$work"' EXIT

commit="$(git -C "$root" rev-parse --short HEAD)" # HEAD may be another one when the trials end
say "building mpishard $version"
mkdir -- "$work/source"
git -C "$root" archive "$commit" | tar -x -C "$work/source"
"$base" -m venv -- "$work/tools"
"$work/tools/bin/python" -m pip --disable-pip-version-check install --quiet build twine
# The wheel is built from the sdist, so that a file missing there is noticed.
"$work/tools/bin/python" -m build --outdir "$work/dist" "$work/source" >"$work/log" 2>&1 ||
    refuse "the build failed: $(cat "$work/log")"
wheel="$work/dist/mpishard-$version-py3-none-any.whl"
sdist="$work/dist/mpishard-$version.tar.gz"

"$work/tools/bin/twine" check --strict "$wheel" "$sdist"

# try_out NAME FILE: runs the quick start in a clean folder, with FILE installed.
try_out() {
    local folder="$work/try $1" own="$work/$1"
    say "installing the $1 and running the quick start"
    mkdir -- "$folder"
    "$base" -m venv -- "$own"
    "$own/bin/python" -m pip --disable-pip-version-check install --quiet "mpishard[mpi] @ file://$2"
    # The first program of README.md, as it is printed there.
    sed -n '/^```python$/,/^```$/{/^```$/q;/^```/!p}' "$root/README.md" >"$folder/quickstart.py"
    cd -- "$folder"
    export OMP_NUM_THREADS=1
    "$own/bin/python" -c "import mpishard, sys
assert mpishard.__version__ == '$version' and mpishard.__file__.startswith(sys.prefix), mpishard"
    "$own/bin/python" quickstart.py | tee threads.txt
    "$own/bin/mpiexec" -n 2 "$own/bin/python" quickstart.py </dev/null | tee mpi.txt
    # The same loss on threads and on MPI ranks; the line of progress has times.
    grep "^loss [0-9]" threads.txt >threads.loss
    grep "^loss [0-9]" mpi.txt | cmp - threads.loss
    "$own/bin/mpishard" --help >/dev/null
}
(try_out wheel "$wheel")
(try_out sdist "$sdist")

rm -rf -- "$root/dist"
mv -- "$work/dist" "$root/dist"
cat <<EOF
mpishard $version is built and tried. Nothing is published. To publish it:
    twine upload dist/${wheel##*/} dist/${sdist##*/}
    git tag v$version $commit
EOF
