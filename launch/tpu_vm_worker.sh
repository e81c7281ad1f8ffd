#!/usr/bin/env bash
# The part of tpu_vm.sh that runs on each host: installs, starts, restarts and stops podrl there, and reports on it.
#
#   tpu_vm_worker.sh install --python=PATH --lock=FILE --extra=NAME
#   tpu_vm_worker.sh start --run=ID --max_restarts=N -- PODRL_FLAGS...
#   tpu_vm_worker.sh follow --lines=N | status | stacks | kill --grace=SECONDS | tell
#
# All files are in ~/podrl-run: code-ID (and `code`, a link to the code that runs), venv, work (the working directory,
# kept from run to run so that relative --workdir paths resume), logs/ID.log, and in state/ the files run, pid, boot,
# restarts, arguments, exit_code. Every action may be repeated without harm: gcloud retries when a connection drops.
set -euo pipefail

base=$HOME/podrl-run
state=$base/state
code=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
lock_file=${PODRL_TPU_LOCK_FILE:-/tmp/libtpu_lockfile}
boot_file=${PODRL_BOOT_ID_FILE:-/proc/sys/kernel/random/boot_id}
device_directory=${PODRL_TPU_DEVICES:-/dev}

worker_number() {
  curl --silent --fail --max-time 5 --header 'Metadata-Flavor: Google' \
    "http://${GCE_METADATA_IP:-metadata.google.internal}/computeMetadata/v1/instance/attributes/agent-worker-number" \
    2>/dev/null || printf '%s' "${TPU_WORKER_ID:-$(hostname)}"
}

say() {
  printf '[w%s] %s\n' "$number" "$*"
}

die() { # SENTENCE; the full stop at its end may be missing
  local said="$*"
  [[ $said == *[.?!] ]] || said+=.
  say "$said" >&2
  exit 1
}

read_state() { # NAME: the file's text, or nothing
  if [[ -s $state/$1 ]]; then cat "$state/$1"; fi
}

our_pid() { # pid of the last started supervisor; nothing after a reboot, when another process may have this pid
  if [[ $(read_state boot) == "$(boot)" ]]; then read_state pid; fi
}

boot() {
  cat "$boot_file"
}

alive() {
  local pid
  pid=$(our_pid)
  [[ -n $pid ]] && grep -qa tpu_vm_worker.sh "/proc/$pid/cmdline" 2>/dev/null
}

find_python() {
  local candidate
  for candidate in python3.13 python3.12 python3.11 python3; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      printf '%s' "$candidate"
      return
    fi
  done
}

install() {
  mkdir -p "$state" "$base/logs"
  if [[ -n $python ]]; then
    "$python" -c '' || die "--python=$python does not run on this worker"
    printf '%s\n' "$python" >"$state/python"
    return
  fi
  local stamp candidate file
  local -a install=("$base/venv/bin/python" -m pip --disable-pip-version-check install --quiet) files=(-r "$code/$lock")
  for file in "$lock" ${extra:+"requirements-$extra.lock"}; do
    [[ -f $code/$file ]] || die "$file is missing from the copied checkout: nothing says what to install"
  done
  [[ -z $extra ]] || files+=(-r "$code/requirements-$extra.lock")
  stamp="$lock $(cat "$code"/requirements*.lock | sha256sum) $extra"
  printf '%s\n' "$base/venv/bin/python" >"$state/python"
  if [[ $(read_state installed) == "$stamp" ]]; then
    say "dependencies are installed already"
    return
  fi
  rm -f "$state/installed"
  candidate=$(find_python)
  if [[ -z $candidate ]] || ! "$candidate" -m venv --clear "$base/venv" >/dev/null 2>&1; then
    say "no Python 3.11-3.13 with venv here: fetching one with uv"
    # Newer images forbid pip to change the system's Python without this variable; --user changes only the home.
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user --require-hashes --only-binary=:all: -r "$code/launch/uv.lock"
    rm -rf "$base/venv"
    # uv checks the interpreter's hash. pip is not installed, because nothing would check pip's hash.
    python3 -m uv venv --quiet --python 3.12.11 "$base/venv"
    install=(python3 -m uv pip install --quiet "--python=$base/venv/bin/python")
  fi
  "${install[@]}" --require-hashes --only-binary=:all: -r "$code/$lock"
  # A package without a wheel (promise, of the extra tfds) is built by the setuptools of the lock file. An isolated build
  # would fetch a setuptools whose hash nothing checks.
  [[ -z $extra ]] || "${install[@]}" --require-hashes --only-binary=:all: --no-build-isolation "${files[@]}"
  printf '%s\n' "$stamp" >"$state/installed"
  say "installed what $lock names${extra:+, and $extra}"
}

start() {
  if alive; then
    [[ $(read_state run) == "$identity" ]] && return
    die "podrl runs here already, pid $(read_state pid), run $(read_state run): tpu_vm.sh TPU ZONE --kill first"
  fi
  # gcloud may retry this start after the run has ended; the run must not begin again.
  [[ $(read_state run) != "$identity" ]] || return 0
  local old interpreter pair
  interpreter=$(read_state python)
  [[ -n $interpreter ]] || die "nothing is installed: run install first"
  ln -sfn "$code" "$base/code"
  for old in "$base"/code-*; do
    [[ $old == "$code" ]] || rm -rf "$old"
  done
  rm -f "$HOME"/podrl-*.tar.gz
  rm -f "$state/exit_code"
  printf '%s\n' "$identity" >"$state/run"
  printf '0\n' >"$state/restarts"
  printf '%s\0' "${arguments[@]}" >"$state/arguments"
  mkdir -p "$base/work"
  ln -sfn "$base/code/configs" "$base/work/configs"
  cd "$base/work"
  local -a environment podrl_command=(setsid nohup bash "$code/launch/tpu_vm_worker.sh" supervise
    "--max_restarts=$max_restarts" -- "$interpreter" -m podrl.launch "${arguments[@]}")
  mapfile -d '' environment <"$code/.podrl-environment" # a command line would show access tokens to every user
  (
    for pair in "PYTHONPATH=$code" "PODRL_SECRET_FILE=$code/.podrl-secret" "${environment[@]}"; do export "${pair?}"; done
    exec "${podrl_command[@]}"
  ) >"$base/logs/$identity.log" 2>&1 </dev/null &
  boot >"$state/boot"
  printf '%s\n' "$!" >"$state/pid"
  say "started run $identity, pid $!"
}

supervise() { # runs the command until it ends for good; the pid of this process is the session's id
  local restarts=0 status child='' interrupted stopping=0
  trap 'interrupted=1; stopping=1; [[ -z $child ]] || kill -TERM "$child" 2>/dev/null || true' TERM INT
  while :; do
    PODRL_RESTART_ATTEMPT=$restarts PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 "${arguments[@]}" &
    child=$!
    ((!stopping)) || kill -TERM "$child" 2>/dev/null || true # the signal came before the child was there
    while :; do
      interrupted=0 status=0
      wait "$child" || status=$?
      ((interrupted)) || break
    done
    if ((stopping || restarts >= max_restarts || (status != 42 && status != 134))); then break; fi
    restarts=$((restarts + 1))
    printf '%s\n' "$restarts" >"$state/restarts"
    printf 'exit status %s: restart %s of %s\n' "$status" "$restarts" "$max_restarts"
    sleep "${PODRL_RESTART_DELAY:-10}"
    ((stopping)) && break
  done
  printf '%s\n' "$status" >"$state/exit_code"
}

# Prints what a slice that joins has to know: secret, address, number of --env values, these values, podrl's flags. Each
# of these texts ends by NUL.
tell() {
  local address
  local -a environment=() flags=()
  alive || die "podrl does not run here"
  # podrl prints this line when hosts may join; it has the address.
  address=$(sed -n 's/.*Further rollout hosts join by this command with --join=\([^ ]*\).*/\1/p' "$base/logs/$(read_state run).log" | tail -n 1)
  [[ -n $address ]] || die "the job here lets no host join, or not yet: it must have begun, with --topology=split"
  mapfile -d '' environment <"$base/code/.podrl-environment"
  mapfile -d '' flags <"$state/arguments"
  printf '%s\0' "$(cat "$base/code/.podrl-secret")" "$address" "${#environment[@]}" "${environment[@]}" "${flags[@]}"
}

follow() {
  local log
  [[ -n $(read_state pid) ]] || die "nothing has been started here"
  log=$base/logs/$(read_state run).log
  local -a on=()
  if alive; then on=(--follow=name "--pid=$(our_pid)"); fi
  tail -n "$lines" "${on[@]}" "$log" 2>/dev/null | sed -u "s/^/[w$number] /"
  local ended
  ended=$(read_state exit_code)
  say "exit status ${ended:-unknown: killed}"
  exit "${ended:-137}"
}

status() {
  local log last=''
  log=$base/logs/$(read_state run).log
  if [[ -f $log ]]; then last=$(tail -n 1 "$log"); fi
  if alive; then
    say "running, pid $(read_state pid), run $(read_state run), restarts $(read_state restarts), last line: $last"
  elif [[ -n $(read_state exit_code) ]]; then
    say "ended with exit status $(read_state exit_code), run $(read_state run), last line: $last"
  elif [[ -n $(read_state pid) ]]; then
    say "was killed, run $(read_state run), last line: $last"
  else
    say "nothing has been started here"
  fi
}

session_processes() {
  local pid
  pid=$(our_pid)
  if [[ -n $pid ]]; then ps -e -o sid=,pid= | awk -v session="$pid" '$1 == session {print $2}'; fi
}

stacks() {
  alive || die "podrl does not run here"
  local pid caught asked=0
  for pid in $(session_processes); do
    # SIGUSR1 kills a process that does not handle it: ask the kernel first (signal 10 is bit 9).
    caught=$(awk '/^SigCgt:/ {print $2}' "/proc/$pid/status" 2>/dev/null) || continue
    if ((0x${caught:-0} & 0x200)); then
      kill -USR1 "$pid" && asked=$((asked + 1))
    fi
  done
  say "asked $asked processes for their stacks: read them with tpu_vm.sh TPU ZONE --logs"
}

device_holders() {
  # Errors of find mean nothing here: processes end meanwhile, and processes of other users do not show their files.
  { find /proc/[0-9]*/fd -maxdepth 1 \( -lname "$device_directory/accel[0-9]*" -o -lname "$device_directory/vfio/[0-9]*" \) \
    -printf '%h\n' 2>/dev/null || true; } | cut -d/ -f3 | sort -un
}

stop() {
  local pid left=$((grace * 2)) holder
  pid=$(our_pid)
  if alive; then
    kill -TERM "$pid"
    while alive && ((left > 0)); do
      sleep 0.5
      left=$((left - 1))
    done
    if alive; then
      say "pid $pid did not end within $grace s of SIGTERM: SIGKILL"
      kill -KILL -- "-$pid" 2>/dev/null || true
    else
      say "stopped run $(read_state run), exit status $(read_state exit_code)"
    fi
  else
    say "podrl does not run here"
  fi
  # Kills children that outlived their parent, and any process of this user that still holds a chip.
  for holder in $(session_processes) $(device_holders); do
    say "killing process $holder: $(tr '\0' ' ' <"/proc/$holder/cmdline" 2>/dev/null | cut -c1-100)"
    kill -KILL "$holder" 2>/dev/null || true
  done
  rm -f "$lock_file"
}

action=${1:?install, start, supervise, follow, status, stacks, kill or tell}
shift
python='' lock='' extra='' identity='' max_restarts=0 lines=200 grace=120
arguments=()
while (($#)); do
  case $1 in
    --python=*) python=${1#*=} ;;
    --lock=*) lock=${1#*=} ;;
    --extra=*) extra=${1#*=} ;;
    --run=*) identity=${1#*=} ;;
    --max_restarts=*) max_restarts=${1#*=} ;;
    --lines=*) lines=${1#*=} ;;
    --grace=*) grace=${1#*=} ;;
    --)
      shift
      arguments=("$@")
      break
      ;;
    *)
      printf 'tpu_vm_worker.sh: unknown flag %s.\n' "$1" >&2
      exit 1
      ;;
  esac
  shift
done
mkdir -p "$state" "$base/logs"
number=$([[ $action == supervise ]] || worker_number)
case $action in
  install | start | supervise | follow | status | stacks | tell) "$action" ;;
  kill) stop ;;
  *)
    printf 'tpu_vm_worker.sh: unknown action %s.\n' "$action" >&2
    exit 1
    ;;
esac
