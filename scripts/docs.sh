#!/usr/bin/env bash
# Builds the site of the documentation: see --help.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'EOT'
usage: scripts/docs.sh [--serve]

Makes .venv (the first time only), builds the documentation into build/site, and prints the path of
the first page. A broken link, a page that is in no menu, and a docstring that cannot be parsed are
errors. --serve shows the pages at http://127.0.0.1:8000 instead, and again after each change.
EOT
}

action=(build --strict)
for argument in "$@"; do
    case "$argument" in
        -h | --help) usage; exit ;;
        --serve) action=(serve --strict --dev-addr 127.0.0.1:8000) ;;
        *) usage >&2; exit 2 ;;
    esac
done

prepare_environment mpi docs
cd -- "$root"
export NO_MKDOCS_2_WARNING=1
"$venv/bin/mkdocs" "${action[@]}"
[ "${action[0]}" = serve ] || echo build/site/index.html
