#!/usr/bin/env bash
# Runs podrl on every host of one TPU slice, from a laptop, through gcloud: a Cloud TPU VM, or a managed instance group.
#
#   launch/tpu_vm.sh TPU ZONE [options] -- --config=grpo_gemma.py --workdir=gs://bucket/run [more podrl flags]
#   launch/tpu_vm.sh TPU ZONE --join=OTHER_TPU [options]
#   launch/tpu_vm.sh TPU ZONE --status | --logs | --stacks | --kill [options]
#
# Without an action: copies this checkout, installs it, starts one process per host and follows the logs, every line
# prefixed by its worker. Ctrl-C stops following, not the run. The exit status is non-zero if any worker's was.
#
#   --code=DIR         a directory with your code, configuration and small data files. It is copied into the bucket of
#                      --workdir, and from there to every host. Relative paths in podrl's flags are then paths in DIR
#   --join=OTHER_TPU   generate for the job that runs there with --topology=split: its flags, --env values and secret are
#                      read from its first host; give no podrl flags here. --kill takes the hosts away again
#   --join_zone=ZONE   zone of OTHER_TPU, if it is not ZONE
#   --status           what runs on every worker, and the state of the TPU
#   --logs             the last lines of every worker, then follow
#   --stacks           every process prints the stacks of all its threads into its log (SIGUSR1)
#   --kill             SIGTERM (podrl saves a checkpoint), SIGKILL after --grace; frees TPU chips and the lock file
#   --dry_run          print the commands, run none
#   --detach           do not follow the logs after starting
#   --group            TPU names a managed instance group of Compute Engine that forms a slice: TPU7x, v6e or v5p
#   --project=P        project of the TPU; default: gcloud's
#   --python=PATH      interpreter on the workers that has podrl's dependencies; nothing is installed then
#   --lock=FILE        lock file of the packages to install, in the root of the checkout; default requirements-tpu.lock
#   --extra=NAME       also installs the packages of requirements-NAME.lock, such as wandb or math
#   --env=NAME=VALUE   environment variable of podrl's processes; may be repeated
#   --max_restarts=N   restarts on exit codes 42 and 134 (a peer or the runtime failed); default 3
#   --grace=SECONDS    time between SIGTERM and SIGKILL of --kill; default 120
set -euo pipefail

usage() {
  sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
}

die() { # SENTENCE; the full stop at its end may be missing
  local said="$*"
  [[ $said == *[.?!] ]] || said+=.
  printf 'tpu_vm.sh: %s\n' "$said" >&2
  exit 1
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
action=start dry_run=0 detach=0 group=0 project='' python='' lock=requirements-tpu.lock extra='' max_restarts=3 grace=120
environment=() positional=() podrl=() scratch='' own_code='' join='' join_zone='' secret=''
while (($#)); do
  case $1 in
    --status | --logs | --stacks | --kill) action=${1#--} ;;
    --dry_run) dry_run=1 ;;
    --detach) detach=1 ;;
    --group) group=1 ;;
    --code=*) own_code=${1#*=} ;;
    --join=*) join=${1#*=} ;;
    --join_zone=*) join_zone=${1#*=} ;;
    --project=*) project=${1#*=} ;;
    --python=*) python=${1#*=} ;;
    --lock=*) lock=${1#*=} ;;
    --extra=*) extra=${1#*=} ;;
    --env=*) environment+=("${1#*=}") ;;
    --max_restarts=*) max_restarts=${1#*=} ;;
    --grace=*) grace=${1#*=} ;;
    --help | -h)
      usage
      exit 0
      ;;
    --)
      shift
      podrl=("$@")
      break
      ;;
    -*) die "unknown flag $1: podrl's own flags stand after --. See --help." ;;
    *) positional+=("$1") ;;
  esac
  shift
done
((${#positional[@]} == 2)) || die "expected TPU and ZONE, got ${#positional[@]} names: tpu_vm.sh TPU ZONE -- --config=..."
[[ $max_restarts =~ ^[0-9]+$ ]] || die "--max_restarts=$max_restarts must be a number"
[[ $grace =~ ^[0-9]+$ ]] || die "--grace=$grace must be a number of seconds"
for pair in "${environment[@]}"; do
  [[ $pair =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || die "--env=${pair%%=*}... must be NAME=VALUE"
  [[ $pair != PODRL_SECRET=* ]] || die "--env=PODRL_SECRET=... would show the job's secret to everyone who lists processes: leave it out, every run is given a new one"
done
tpu=${positional[0]}
where=("--zone=${positional[1]}")
[[ -z $project ]] || where+=("--project=$project")

run() {
  printf '+' >&2
  printf ' %q' "$@" >&2
  printf '\n' >&2
  ((dry_run)) || "$@"
}

hosts=()
find_hosts() { # finds the names of the instances of a managed instance group
  local -a list=(gcloud compute instance-groups managed list-instances "$tpu" "${where[@]}" '--format=value(instance.basename())')
  ((!${#hosts[@]})) || return 0
  mapfile -t hosts < <(run "${list[@]}" | sort)
  if ((dry_run)); then hosts=(EACH_HOST); fi
  ((${#hosts[@]})) || die "the managed instance group $tpu has no instance, or cannot be listed; see above"
}

on_every_host() { # COMMAND... with @HOST@ for the name: runs on all hosts of the group at once, fails if one fails
  local host pid status=0
  local -a pids=()
  find_hosts
  for host in "${hosts[@]}"; do
    run "${@//@HOST@/$host}" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
  return "$status"
}

on_every_worker() { # COMMAND, for the workers' shell
  if ((group)); then
    on_every_host gcloud compute ssh @HOST@ "${where[@]}" --command="$1"
    return
  fi
  run gcloud compute tpus tpu-vm ssh "$tpu" "${where[@]}" --worker=all --command="$1"
}

worker() { # CODE ARGUMENTS...: the worker's half of this script, from the copy of the checkout in CODE
  local words script=$1/launch/tpu_vm_worker.sh
  printf -v words ' %q' "${@:2}"
  on_every_worker "[ -e $script ] || { echo 'tpu_vm.sh never started podrl on this TPU' >&2; exit 1; }; bash $script$words"
}

new_secret() {
  od -An -N16 -tx1 /dev/urandom | tr -d ' \n'
}

ask_job() { # asks the job of --join for its secret, the values of --env, podrl's flags and its address
  local -a told there=("--zone=${join_zone:-${positional[1]}}")
  [[ -z $project ]] || there+=("--project=$project")
  (umask 077 && run gcloud compute tpus tpu-vm ssh "$join" "${there[@]}" --worker=0 \
    --command='bash podrl-run/code/launch/tpu_vm_worker.sh tell' >"$scratch/told") || die "$join does not say what it runs; see above"
  if ((dry_run)); then
    podrl=(FLAGS_OF_THE_JOB --join=ITS_ADDRESS)
    return
  fi
  mapfile -d '' told <"$scratch/told"
  secret=${told[0]:-}
  [[ $secret =~ ^[0-9a-f]{32}$ && ${told[2]:-} =~ ^[0-9]+$ ]] || die "what $join says of the job it runs is not complete"
  environment=("${told[@]:3:told[2]}" "${environment[@]}") # of equal names the last counts: this command's
  podrl=("${told[@]:3+told[2]}" "--join=${told[1]}")
}

copy_code() {
  local archive=$1 pair
  if git -C "$root" rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    # Lists tracked and new files, without files that git ignores and files that have been deleted.
    git -C "$root" ls-files -z --cached --others --exclude-standard >"$scratch/all"
    while IFS= read -r -d '' name; do
      [[ ! -e $root/$name ]] || printf '%s\0' "$name"
    done <"$scratch/all" >"$scratch/names"
  else
    (cd "$root" && find . \( -name .git -o -name __pycache__ -o -name runs \) -prune -o -type f -print0) >"$scratch/names"
  fi
  # The hosts of a job encrypt their channel with this secret. Every job has a new one, and no command line shows it.
  (umask 077 && if [[ -n $secret ]]; then printf '%s' "$secret"; else new_secret; fi >"$scratch/.podrl-secret")
  # The variables of --env go the same way, because they may hold access tokens.
  (umask 077 && : >"$scratch/.podrl-environment")
  for pair in "${environment[@]}"; do printf '%s\0' "$pair"; done >>"$scratch/.podrl-environment"
  run tar -czf "$scratch/$archive" -C "$scratch" .podrl-secret .podrl-environment -C "$root" --null -T "$scratch/names"
  if ((group)); then
    on_every_host gcloud compute scp "$scratch/$archive" "@HOST@:$archive" "${where[@]}"
  else
    run gcloud compute tpus tpu-vm scp "$scratch/$archive" "$tpu:$archive" "${where[@]}" --worker=all
  fi
}

start() {
  ((${#podrl[@]})) || [[ -n $join ]] || die "nothing to run: give podrl's flags after --, as -- --config=grpo_gemma.py"
  [[ -z $join ]] || ((!${#podrl[@]})) || die "--join=$join takes podrl's flags from the job there: leave out what stands after --"
  [[ $join != "$tpu" || ${join_zone:-${positional[1]}} != "${positional[1]}" ]] || die "--join=$join is this TPU itself: name the one that trains"
  [[ -e $root/podrl/launch.py ]] || die "this copies a checkout of podrl, and $root is none: run launch/tpu_vm.sh of a clone"
  [[ -z $join ]] || ((!group)) || die "--join=$join asks a Cloud TPU VM for its job, and --group names none: start podrl.launch there with --join=HOST:PORT"
  [[ -z $join || -z $own_code ]] || die "--join=$join takes the code of the job there: leave out --code=$own_code"
  local identity archive code url='' status=0
  local -a sent=()
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  [[ -z $own_code ]] || sent=("--code=$own_code" "--archive=$scratch/code.tar")
  # Refuses settings here that the hosts would refuse only after everything is copied and installed. Without python3 on
  # this machine, only the hosts check them.
  [[ -n $join ]] || url=$(python3 "$root/launch/submission.py" "${sent[@]}" -- "${podrl[@]}" 2>"$scratch/refused") || status=$?
  ((status != 3)) || die "$(cat "$scratch/refused")"
  if [[ -n $own_code ]]; then
    ((!status)) || die "--code=$own_code could not be packed; this needs Python 3.10 or later here, as python3: $(tail -n 1 "$scratch/refused")"
    run gcloud storage cp "$scratch/code.tar" "$url"
    podrl+=("--code=$url")
  fi
  [[ -z $join ]] || ask_job
  identity=$(date -u +%Y%m%d-%H%M%S)-$$
  archive=podrl-$identity.tar.gz
  code=podrl-run/code-$identity
  copy_code "$archive"
  # Every host installs before any host starts, so that no host waits for others that still install.
  on_every_worker "mkdir -p $code && tar -xzf $archive -C $code"
  worker "$code" install "--python=$python" "--lock=$lock" "--extra=$extra"
  worker "$code" start "--run=$identity" "--max_restarts=$max_restarts" -- "${podrl[@]}"
  ((detach)) || worker podrl-run/code follow --lines=+1
}

case $action in
  start) start ;;
  status)
    if ((group)); then
      run gcloud compute instance-groups managed list-instances "$tpu" "${where[@]}"
    else
      run gcloud compute tpus tpu-vm describe "$tpu" "${where[@]}" '--format=value(state,health)'
    fi
    worker podrl-run/code status
    ;;
  logs) worker podrl-run/code follow --lines=200 ;;
  stacks) worker podrl-run/code stacks ;;
  kill) worker podrl-run/code kill "--grace=$grace" ;;
esac
