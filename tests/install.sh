#!/bin/sh
# Installs programs for tests from Debian's packages:
#
#   install.sh "what is not tested without them" "PROGRAM ..." PACKAGE ...
#
# If that is not possible, it says so loudly, and these tests are skipped.
set -u
untested=$1 programs=$2
shift 2

have_all() { for program in $programs; do command -v "$program" || return; done >/dev/null 2>&1; }
have_all && exit 0

skip() {
    echo "***********************************************************************"
    echo "*** No $programs: $untested:"
    echo "*** $1"
    echo "***********************************************************************"
    exit 0
}

command -v apt-get >/dev/null 2>&1 || skip "apt-get is not here; install $programs"
[ "$(id -u)" = 0 ] || skip "not root; run: sudo apt-get install $*"
# Services must not start: the tests run their own.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy" && trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
install() { apt-get install -qq -y --no-install-recommends "$@" >/dev/null 2>&1; }
install "$@" || { apt-get update -qq >/dev/null 2>&1 && install "$@"; } || skip "apt-get install $* failed"
