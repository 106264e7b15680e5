// CoreDNS with the plugins that the local cluster's Corefile names, and no others.
//
// CoreDNS is meant to be built this way (https://coredns.io/2017/07/25/compile-time-enabling-or-disabling-plugins/).
// The stock list of plugins compiles clients of four clouds and two tracing systems: four more minutes for a newcomer.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
)

func main() {
	// The order in which a query passes through the plugins, as in CoreDNS's own plugin.cfg.
	dnsserver.Directives = []string{"health", "ready", "errors", "cache", "kubernetes"}
	coremain.Run()
}
