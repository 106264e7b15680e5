{{- /* A Service's name begins with a letter and has no dot; a release's may not, and may. */}}
{{- define "shoal.name" -}}
{{- $own := regexMatch "^[a-z]" .Release.Name | ternary .Release.Name (printf "shoal-%s" .Release.Name) }}
{{- .Values.fullnameOverride | default .Values.nameOverride | default $own | replace "." "-" | trunc 50 | regexFind ".*[^-]" }}
{{- end }}
{{- /* The namespace whose jobs are managed; empty: all. */}}
{{- define "shoal.scope" -}}{{ .Values.scope.namespace | default "" }}{{- end }}
{{- define "shoal.serviceAccount" -}}{{ .Values.serviceAccount.name | default (include "shoal.name" .) }}{{- end }}
{{- define "shoal.pools.name" -}}{{ printf "%s-pools" (include "shoal.name" .) }}{{- end }}
{{- define "shoal.pools.serviceAccount" -}}{{ .Values.pools.serviceAccount.name | default (include "shoal.pools.name" .) }}{{- end }}
{{- define "shoal.installKey" -}}{{ .Values.installKey.existingSecret | default (printf "%s-install-key" (include "shoal.name" .)) }}{{- end }}
{{- /* The name of a process' Service, which has at most 63 characters; of the process' name. */}}
{{- define "shoal.service" -}}{{ printf "%s-metrics" . | trunc 63 }}{{- end }}
{{- /* What selects the pods of a process, the labels of its pods, and those of its objects. `app`: its name; `chart`: the scope of all templates. */}}
{{- define "shoal.selector.of" -}}
app.kubernetes.io/name: {{ .app }}
app.kubernetes.io/instance: {{ .chart.Release.Name | quote }}
{{- end }}
{{- define "shoal.podLabels.of" -}}
{{ include "shoal.selector.of" . }}
app.kubernetes.io/version: {{ .chart.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .chart.Release.Service }}
{{- with .chart.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- /* A version may have a `+` and be long, a label may not; Flux adds the commit to it, for which no pod should restart. */}}
{{- define "shoal.labels.of" -}}
{{ include "shoal.podLabels.of" . }}
helm.sh/chart: {{ printf "%s-%s" .chart.Chart.Name .chart.Chart.Version | replace "+" "_" | trunc 63 | regexFind ".*[A-Za-z0-9]" }}
{{- end }}
{{- define "shoal.selector" -}}{{ include "shoal.selector.of" (dict "app" "shoal" "chart" .) }}{{- end }}
{{- define "shoal.labels" -}}{{ include "shoal.labels.of" (dict "app" "shoal" "chart" .) }}{{- end }}
{{- define "shoal.pools.selector" -}}{{ include "shoal.selector.of" (dict "app" "shoal-pools" "chart" .) }}{{- end }}
{{- define "shoal.pools.labels" -}}{{ include "shoal.labels.of" (dict "app" "shoal-pools" "chart" .) }}{{- end }}
{{- define "shoal.check.selector" -}}{{ include "shoal.selector.of" (dict "app" "shoal-check" "chart" .) }}{{- end }}
{{- /* Of a map of labels and the chart's own, in YAML: no key twice. */}}
{{- define "shoal.merged" -}}{{ mergeOverwrite (last . | fromYaml) (first . | default dict) | toYaml }}{{- end }}
{{- define "shoal.image" -}}
{{- $repository := required "image.repository is not set: no image is published yet. `make images REGISTRY=registry.example.com/team` builds them and prints the values" .Values.image.repository }}
{{- if .Values.image.digest }}{{ printf "%s@%s" $repository .Values.image.digest }}{{ else }}{{ printf "%s:%s" $repository (.Values.image.tag | default .Chart.AppVersion) }}{{ end }}
{{- end }}
{{- /* The account of the operator as the API server sees it. */}}
{{- define "shoal.username" -}}system:serviceaccount:{{ .Release.Namespace }}:{{ include "shoal.serviceAccount" . }}{{- end }}
{{- /* How a monitor scrapes; of its values. */}}
{{- define "shoal.scrape" -}}
interval: {{ .interval }}
{{- with .scrapeTimeout }}
scrapeTimeout: {{ . }}
{{- end }}
{{- with .relabelings }}
relabelings: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .metricRelabelings }}
metricRelabelings: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Probes come from the nodes, whose addresses no selector has; the health port says no more than that it is up. */}}
{{- define "shoal.admitted" -}}
- ports: [{port: health}]
- ports:
    {{- range .ports }}
    - {port: {{ . }}}
    {{- end }}
  {{- with .from }}
  from: {{- toYaml . | nindent 4 }}
    - {podSelector: {matchLabels: {{ $.check | fromYaml | toJson }}}}
  {{- end }}
{{- end }}
{{- /* What both processes reach: DNS, the API server, and what else the values of egress name. */}}
{{- define "shoal.reached" -}}
- ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
- ports:
    {{- range .apiServer.ports }}
    - {port: {{ . }}}
    {{- end }}
  {{- with .apiServer.cidrs }}
  to:
    {{- range . }}
    - {ipBlock: {cidr: {{ . | quote }}}}
    {{- end }}
  {{- end }}
{{- with .rules }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- /* What each parameter server listens on, by one port each: of a range, a plugin that does not know `endPort` opens the first. */}}
{{- define "shoal.ports" -}}
[{port: 7070}, {port: 7071}, {port: 7072}]
{{- end }}
