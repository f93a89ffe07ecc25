# ENA Express needs frames of at most 8900 bytes, and wants long rings and no byte queue limits:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ena-express.html
# https://github.com/amzn/amzn-ec2-ena-utilities/tree/main/ena-express
for device in /sys/class/net/*; do
    # A container has other drivers and stays as it is.
    case "$(readlink "$device/device/driver")" in */ena) ;; *) continue ;; esac
    name=${device##*/}
    # The first run only: a new ring size interrupts the traffic.
    if [ ! -e "$state/ena-$name" ]; then
        touch "$state/ena-$name"
        sysctl -qw net.ipv4.tcp_autocorking=0
        timeout 10 ethtool -G "$name" rx 8192
        for limit in "$device"/queues/tx-*/byte_queue_limits/limit_min; do
            [ -e "$limit" ] && echo max >"$limit"
        done
    fi
    # Every run: each DHCP lease brings AWS's usual 9001.
    [ "$(cat "$device/mtu")" = "$mtu" ] || ip link set "$name" mtu "$mtu"
done
