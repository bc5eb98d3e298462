# Sourced by local.sh and slurm/fedmpi.sbatch: runs a job so that signals reach rank 0 and its exit code can be believed.
#
#   mpirun_flags [RANKS] sets flags to what the MPI on PATH needs; RANKS: on this machine alone, however few cores it has
#   run_job COMMAND...   prints and runs it, and returns its exit code: 0 if rank 0 ended well and its summary.json is there, and only then
#
# A launcher that gets a signal kills every rank, and its exit code 0 is no proof of anything: Open MPI's has it after SIGUSR1, and
# when a host goes down. So it runs in a session of its own, where the terminal's Ctrl-C does not reach it, and SIGINT, SIGTERM,
# SIGHUP and SIGUSR1 go to rank 0, whose process id is in FEDMPI_JOB, a folder that is made here (fedmpi/runtime/job.py). From the
# third on, or where rank 0 is not to be found, they end the launcher.
#
#   FEDMPI_JOBS     where that folder is made; rank 0's host must see it (default TMPDIR, or /tmp)
#   FEDMPI_LAUNCH   how a person starts the job again; what is said of --resume begins with it

mpirun_flags() {
    flags=()
    case "$(mpirun --version 2>&1 || true)" in
        *"Open MPI"* | *PRRTE* | *prterun*)
            if [ "$(id -u)" = 0 ]; then
                export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
            fi
            if [ "${1:-0}" -gt "$(nproc)" ]; then
                flags+=(--map-by :oversubscribe)
            fi
            # A core per rank is not to be had, and a rank that is bound to a busy core waits for it.
            flags+=(--bind-to none)
            # With ULFM a rank that dies is an error that names it, not a job that vanishes.
            flags+=(--with-ft ulfm)
            # Nor is a host out of reach the end of it, as it is for Open MPI's launcher once it knows: after eight minutes, by keepalive.
            export PRTE_MCA_oob_tcp_keepalive_time="${PRTE_MCA_oob_tcp_keepalive_time:-0}"
            ;;
        *) ;; # MPICH and its relatives take -n as it is
    esac
}

run_job() {
    local launcher code heard said=0
    FEDMPI_JOB="$(mktemp -d "${FEDMPI_JOBS:-${TMPDIR:-/tmp}}/fedmpi-job.XXXXXX")"
    export FEDMPI_JOB FEDMPI_LAUNCH
    printf '$ %s\n' "$*" >&2
    setsid "$@" < /dev/null &
    launcher=$!
    trap 'pass_on INT' INT
    trap 'pass_on TERM' TERM HUP
    trap 'pass_on USR1' USR1
    # A signal ends `wait`, not the job.
    while heard= code=0; wait "$launcher" || code=$?; [ -n "$heard" ]; do :; done
    trap - INT TERM HUP USR1
    look_for_result
    rm -rf "$FEDMPI_JOB"
    return "$code"
}

# pass_on SIGNAL: to rank 0; uses run_job's variables.
pass_on() {
    local pid= host=
    heard=1 said=$((said + 1))
    { read -r pid host < "$FEDMPI_JOB/rank0"; } 2> /dev/null || true
    [ "$said" -le 2 ] && [ -n "$pid" ] && [ "$host" = "$(uname -n)" ] && kill -s "$1" "$pid" 2> /dev/null ||
        kill -s TERM "$launcher" 2> /dev/null || true
}

# Sets run_job's code to 1 where it is 0 without a result, and says how to go on with what there is.
look_for_result() {
    local out= result=
    { read -r out < "$FEDMPI_JOB/out"; } 2> /dev/null || true
    { read -r result < "$FEDMPI_JOB/done"; } 2> /dev/null || true
    if [ -n "$result" ] && [ -f "$result" ]; then
        code=0 # whatever became of the launcher after that, as over a host that is out of reach
        return
    fi
    if [ "$code" = 0 ]; then
        [ -f "$FEDMPI_JOB/done" ] && [ -z "$result" ] && return
        code=1
        echo "launch: the job ended without its result, though the launcher says nothing of it" >&2
    fi
    if [ -n "$out" ] && [ "$code" != 75 ] && [ ! -f "$out/summary.json" ]; then # 75: rank 0 has said so itself
        echo "launch: exit code $code; to go on: $FEDMPI_LAUNCH --resume $out" >&2
    fi
}
