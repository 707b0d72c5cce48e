#!/bin/sh
# Installs Chromium for the tests of the page from Debian's packages: `make page-test`. If that is not
# possible, it says so loudly, and these tests are skipped.
set -u

command -v chromium >/dev/null 2>&1 && exit 0

skip() {
    echo "***********************************************************************"
    echo "*** No Chromium: the page will NOT be tested in a browser:"
    echo "*** $1"
    echo "***********************************************************************"
    exit 0
}

command -v apt-get >/dev/null 2>&1 || skip "apt-get is not here; install chromium"
[ "$(id -u)" = 0 ] || skip "not root; run: sudo apt-get install chromium fonts-dejavu-core"
export DEBIAN_FRONTEND=noninteractive
install() { apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null 2>&1; }
install || { apt-get update -qq >/dev/null 2>&1 && install; } || skip "apt-get install chromium failed"
