// registry is an OCI registry in memory, with TLS and a password, for the dry run of a release. It prints its address.
package main

import (
	"crypto/subtle"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"

	"github.com/google/go-containerregistry/pkg/registry"
)

func main() {
	if len(os.Args) != 5 {
		log.Fatal("usage: registry CERTIFICATE KEY USER PASSWORD")
	}
	user, password := os.Args[3], os.Args[4]
	kept := registry.New(registry.Logger(log.New(os.Stderr, "", 0)))
	guarded := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name, word, _ := r.BasicAuth()
		if subtle.ConstantTimeCompare([]byte(name+"\n"+word), []byte(user+"\n"+password)) != 1 {
			w.Header().Set("WWW-Authenticate", `Basic realm="registry"`)
			http.Error(w, "who are you?", http.StatusUnauthorized)
			return
		}
		kept.ServeHTTP(w, r)
	})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(listener.Addr())
	log.Fatal(http.ServeTLS(listener, guarded, os.Args[1], os.Args[2]))
}
