#!/bin/sh
# Answers one request as EC2's instance metadata does, version 2 only; systemd connects stdin and stdout.
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html
files=/var/lib/cloud/seed/nocloud/metadata
tokens=/run/embedded-cloud-tokens
cr=$(printf '\r')
now=$(date +%s)

answer() { # status, body
    printf 'HTTP/1.1 %s\r\nServer: EC2ws\r\nContent-Type: text/plain\r\nConnection: close\r\n' "$1"
    printf 'Content-Length: %s\r\n\r\n%s' ${#2} "$2"
    exit 0
}

read -r method path _
token='' seconds=''
while read -r name value && [ "$name" != "$cr" ] && [ -n "$name" ]; do
    value=${value%"$cr"}
    case $(echo "$name" | tr '[:upper:]' '[:lower:]') in
    x-aws-ec2-metadata-token:) token=$value ;;
    x-aws-ec2-metadata-token-ttl-seconds:) seconds=$value ;;
    x-forwarded-for:) [ "$method" != PUT ] || answer '403 Forbidden' '' ;;
    esac
done

if [ "$method $path" = "PUT /latest/api/token" ]; then
    case $seconds in '' | *[!0-9]* | ??????*) answer '400 Bad Request' '' ;; esac
    [ "$seconds" -ge 1 ] && [ "$seconds" -le 21600 ] || answer '400 Bad Request' ''
    mkdir -p -m 700 $tokens
    find $tokens -type f -mmin +361 -delete
    read -r token </proc/sys/kernel/random/uuid
    echo $((now + seconds)) >"$tokens/$token"
    answer '200 OK' "$token"
fi
[ "$method" = GET ] || answer '405 Method Not Allowed' ''
case $token in '' | *[!0-9a-f-]*) answer '401 Unauthorized' '' ;; esac
ends=0
[ ! -e "$tokens/$token" ] || read -r ends <"$tokens/$token"
[ "$ends" -gt "$now" ] || answer '401 Unauthorized' ''
case $path in *..*) answer '404 Not Found' '' ;; esac
[ ! -f "$files$path" ] || answer '200 OK' "$(cat "$files$path")"
[ ! -d "$files$path" ] || answer '200 OK' "$(ls -p "$files$path")"
answer '404 Not Found' ''
