#!/bin/sh
# Installs Prometheus and promtool for the tests from Debian's packages: `make prometheus`. If that is
# not possible, it says so loudly, and the tests that need them are skipped.
set -u

command -v prometheus >/dev/null 2>&1 && command -v promtool >/dev/null 2>&1 && exit 0

skip() {
    echo "***********************************************************************"
    echo "*** No Prometheus: rules, alerts and dashboards will NOT be checked:"
    echo "*** $1"
    echo "***********************************************************************"
    exit 0
}

command -v apt-get >/dev/null 2>&1 || skip "apt-get is not here; install prometheus and promtool"
[ "$(id -u)" = 0 ] || skip "not root; run: sudo apt-get install prometheus"
# Its service must not start: the tests run their own.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy" && trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
install() { apt-get install -qq -y --no-install-recommends prometheus >/dev/null 2>&1; }
install || { apt-get update -qq >/dev/null 2>&1 && install; } || skip "apt-get install prometheus failed"
