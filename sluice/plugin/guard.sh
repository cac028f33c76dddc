#!/bin/sh
# Runs before slurmctld starts (ExecStartPre), and must never keep it from starting: every way out is exit 0.
#
# The plugins fit one version of Slurm, to the last digit, and slurmctld ends when its configuration names others. So the file that
# slurm.conf includes for them is made the one that loads them only while the installed slurmctld is the one that they were
# built for; else the one with stock Slurm's own plugins. Both are next to this script, and so is `facts`, which install wrote:
# SLURM_VERSION, SLURMCTLD, INCLUDE and PLUGINS.

say() { echo "sluice guard: $*" >&2; }

here=$(dirname "$(readlink -f "$0" 2>/dev/null || echo "$0")")
[ -r "$here/facts" ] || { say "$here/facts is missing: nothing done"; exit 0; }
SLURM_VERSION='' SLURMCTLD='' INCLUDE='' PLUGINS=''
while IFS='=' read -r key value; do
    case $key in
    SLURM_VERSION) SLURM_VERSION=$value ;;
    SLURMCTLD) SLURMCTLD=$value ;;
    INCLUDE) INCLUDE=$value ;;
    PLUGINS) PLUGINS=$value ;;
    esac
done <"$here/facts"
[ -n "$INCLUDE" ] || { say "$here/facts names no include file: nothing done"; exit 0; }

wanted=on
reason=
if [ -e "$here/../disabled" ]; then
    wanted=stock
    reason="switched off by: sluice plugin disable"
else
    said=$(timeout 5 "$SLURMCTLD" -V 2>/dev/null </dev/null)
    installed=${said##* }
    if [ "$installed" != "$SLURM_VERSION" ]; then
        wanted=stock
        reason="slurmctld is ${installed:-of unknown version}, the plugins are for $SLURM_VERSION; build and install them again: sluice plugin install"
    fi
    for plugin in $PLUGINS; do
        [ -r "$here/$plugin" ] && continue
        wanted=stock
        reason="$here/$plugin is missing; install the plugins again: sluice plugin install"
    done
fi
[ -r "$here/$wanted.conf" ] || { say "$here/$wanted.conf is missing: nothing done"; exit 0; }
[ "$wanted" = on ] || say "Slurm starts without Sluice's plugins: $reason"

fresh=$INCLUDE.$$
if { [ -z "$reason" ] || echo "# $reason"; cat "$here/$wanted.conf"; } >"$fresh" 2>/dev/null; then
    chmod 644 "$fresh" 2>/dev/null
    if cmp -s "$fresh" "$INCLUDE"; then
        rm -f "$fresh"
    else
        mv -f "$fresh" "$INCLUDE" || say "$INCLUDE cannot be replaced"
    fi
else
    rm -f "$fresh"
    cmp -s "$here/$wanted.conf" "$INCLUDE" || say "$INCLUDE cannot be written: it stays as it is"
fi
exit 0
