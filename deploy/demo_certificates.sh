#!/bin/sh
# Makes certificates to try TLS with, using only openssl: an authority, and for each name a folder with
# tls.crt, tls.key and ca.crt, laid out as by cert-manager.
#
#   deploy/demo_certificates.sh certificates                 for the names below
#   deploy/demo_certificates.sh certificates verify          renews one of them
#
# For demonstrations only: the authority's key is beside them. They are valid for DAYS (30).
set -eu

folder=${1:?"usage: $0 FOLDER [NAME]..."}
shift
[ $# -gt 0 ] || set -- orchestrator draft verify prometheus operator client
days=${DAYS:-30}
umask 077
mkdir -p "$folder"
ca="$folder/authority"

if [ ! -f "$ca.key" ]; then
	openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -sha256 \
		-days 365 -subj "/CN=flyspec demo authority" -keyout "$ca.key" -out "$ca.crt" \
		-addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign"
fi

for name in "$@"; do
	mkdir -p "$folder/$name"
	new="$folder/$name/new"
	printf '%s\n' "subjectAltName=DNS:$name,DNS:localhost,IP:127.0.0.1,IP:::1" \
		"extendedKeyUsage=serverAuth,clientAuth" "basicConstraints=CA:FALSE" > "$new.ext"
	openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes \
		-subj "/CN=$name" -keyout "$new.key" -out "$new.csr"
	openssl x509 -req -sha256 -in "$new.csr" -CA "$ca.crt" -CAkey "$ca.key" -CAcreateserial \
		-days "$days" -extfile "$new.ext" -out "$new.crt"
	cp "$ca.crt" "$folder/$name/ca.crt"
	mv "$new.crt" "$folder/$name/tls.crt"
	mv "$new.key" "$folder/$name/tls.key"
	rm "$new.csr" "$new.ext"
done
