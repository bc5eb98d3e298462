#!/usr/bin/env bash
# Sets everything up in .venv (once) and runs the main job: a server and 20 clients on this machine.
# Arguments go to fedmpi: ./launch/demo.sh --epsilon inf
set -euo pipefail
. "$(dirname "$0")/setup.sh"
set_up ""
printf '$ ./launch/local.sh -n 21 %s\n' "$*"
exec ./launch/local.sh -n 21 "$@"
