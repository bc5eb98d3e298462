#!/usr/bin/env bash
# launch/slurm/paper_table.sh TABLE [--yes] [options of benchmarks.paper_tables]: a whole table of the first paper on a SLURM
# cluster. One array task a run, then a job that prints the table once they have ended. It looks for the data, says how much it
# would queue, and asks; --yes is the answer where nobody can be asked. From the project's folder, environment active:
#
#   ./launch/slurm/paper_table.sh II --seeds 3 --data-dir DIR
#   SBATCH_GRES=gpu:1 SBATCH_PARTITION=gpu ./launch/slurm/paper_table.sh II --columns cifar10-s5 --data-dir DIR
#
# SBATCH_* variables go to sbatch as it documents them; FEDMPI_AT_ONCE bounds how many runs are under way. Started again, it runs
# what is missing and goes on with what was cut off.
set -euo pipefail
cd "$(dirname "$0")/../.."
yes= arguments=()
for word in "$@"; do
    if [ "$word" = --yes ]; then yes=1; else arguments+=("$word"); fi
done
set -- "${arguments[@]}"
[ $# -ge 1 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
command -v sbatch > /dev/null || {
    echo "paper_table.sh: no sbatch on PATH; without SLURM: python -m benchmarks.paper_tables $*" >&2
    exit 2
}

run() {
    printf '$ %s\n' "$*" >&2
    "$@"
}

listing="$(python -m benchmarks.paper_tables "$@" --list)"
[[ "$listing" == "0 "* ]] || { printf '%s\n' "$listing"; exit 0; } # --help, or nothing to run
ranks=21 previous=
for word in "$@"; do
    case "$word" in --ranks=*) ranks="${word#--ranks=}" ;; esac
    [ "$previous" != --ranks ] || ranks="$word"
    previous="$word"
done
plan="$(python -m benchmarks.paper_tables "$@" --check)" || exit 2
limit="${SBATCH_TIMELIMIT:-$(sed -n 's/^#SBATCH --time=//p' launch/slurm/paper_table.sbatch)}"
echo "table $1: $plan; the limit of a run is $limit" >&2
if [ -z "$yes" ]; then
    [ -t 0 ] || { echo "paper_table.sh: nothing queued: there is no terminal to ask at; --yes queues it" >&2; exit 2; }
    read -r -p "queue it? [y/N] " answer || answer=
    case "$answer" in
        [yY] | [yY]es) ;;
        *) echo "nothing queued" >&2; exit 1 ;;
    esac
fi
last=$(($(wc -l <<< "$listing") - 1))
mkdir -p runs/slurm
array="$(run sbatch --parsable --ntasks="$ranks" --array="0-$last${FEDMPI_AT_ONCE:+%$FEDMPI_AT_ONCE}" launch/slurm/paper_table.sbatch "$@")"
table="$(run sbatch --parsable --ntasks=1 --dependency="afterany:${array%%;*}" launch/slurm/paper_table.sbatch "$@" --show)"
echo "$((last + 1)) runs in job ${array%%;*}; the table comes with job ${table%%;*}, in runs/slurm/paper-table-${table%%;*}.out"
