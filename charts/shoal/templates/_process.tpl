{{- /*
The template of the pods of a process: what the values say of both.
`app`: its name; `account`; `container`; `resources`; `own`: what it alone has, in YAML; `chart`: the scope of all templates.
cluster-autoscaler by default never removes a node with a pod that has a volume there, unless an annotation names it.
Alive: as for the Lease, which a process leaves that stands still for 60 s.
*/}}
{{- define "shoal.process" -}}
{{- $values := .chart.Values }}
{{- $own := .own | fromYaml }}
{{- $selector := include "shoal.selector.of" . }}
metadata:
  labels: {{- include "shoal.merged" (list $values.podLabels (include "shoal.podLabels.of" .)) | nindent 4 }}
  annotations: {{- include "shoal.merged" (list $values.podAnnotations "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes: tmp") | nindent 4 }}
spec:
  serviceAccountName: {{ .account | quote }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  terminationGracePeriodSeconds: 10
  securityContext: {{- toYaml $values.podSecurityContext | nindent 4 }}
  {{- with $own.initContainers }}
  initContainers: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .container }}
      image: {{ include "shoal.image" .chart | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      {{- with $own.command }}
      command: {{ toJson . }}
      {{- end }}
      env:
        - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        - {name: POD_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
        {{- include "shoal.nodes" .chart | nindent 8 }}
        - {name: SHOAL_METRICS_PORT, value: {{ $values.metrics.port | quote }}}
        - {name: SHOAL_HEALTH_PORT, value: "8081"}
        - {name: SHOAL_LOG_LEVEL, value: {{ $values.logLevel | quote }}}
        - {name: SHOAL_LOG_FORMAT, value: {{ $values.logFormat | quote }}}
        {{- with $own.env }}{{ toYaml . | nindent 8 }}{{ end }}
      ports:
        - {name: metrics, containerPort: {{ $values.metrics.port }}}
        - {name: health, containerPort: 8081}
        {{- with $own.ports }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- $probe := dict "liveness" (dict "httpGet" (dict "path" "/healthz" "port" "health") "periodSeconds" 10 "failureThreshold" 6) "readiness" (dict "httpGet" (dict "path" "/readyz" "port" "health") "periodSeconds" 5) "startup" (dict "httpGet" (dict "path" "/healthz" "port" "health") "periodSeconds" 1 "failureThreshold" 60) }}
      {{- range $kind, $default := $probe }}
      {{- $given := index $values.probes $kind }}
      {{- if or $given.exec $given.grpc $given.tcpSocket }}{{ $default = omit $default "httpGet" }}{{ end }}
      {{ $kind }}Probe: {{- mergeOverwrite $default $given | toYaml | nindent 8 }}
      {{- end }}
      securityContext: {{- toYaml $values.securityContext | nindent 8 }}
      resources: {{- toYaml .resources | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- with $own.volumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
  volumes:
    - {name: tmp, emptyDir: {sizeLimit: 64Mi}}
    {{- with $own.volumes }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with $values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  affinity:
    {{- with $values.affinity }}{{ toYaml . | nindent 4 }}{{ else }}{{ include "shoal.affinity" (dict "selector" $selector "values" $values) | nindent 4 }}{{ end }}
  {{- with $values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    - {{- toYaml . | nindent 6 }}
      {{- if not (hasKey . "labelSelector") }}
      labelSelector:
        matchLabels: {{- $selector | nindent 10 }}
      {{- end }}
    {{- end }}
  {{- end }}
{{- end }}

{{- /* Replicas of a selector prefer different nodes, and none that the cloud may take: what replaces lost pods must not go with them. */}}
{{- define "shoal.affinity" -}}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {{- .selector | nindent 12 }}
nodeAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      preference:
        matchExpressions:
          {{- range $key, $values := include "shoal.spot" .values | fromYaml }}
          - {key: {{ $key }}, operator: NotIn, values: {{ toJson $values }}}
          {{- end }}
{{- end }}

{{- /*
The labels of spot nodes that a pod avoids on a platform: as pods of jobs do (operator/shoal/manifests/platforms.py), of which this is a copy that
a test compares. Autopilot admits its own only. The Karpenter of EKS Auto Mode makes no node for a pod that names the key of node groups: `auto` may be that.
*/}}
{{- define "shoal.spot" -}}
cloud.google.com/gke-spot: ["true"]
{{- if ne .platform "autopilot" }}
cloud.google.com/gke-preemptible: ["true"]
cloud.google.com/gke-provisioning: [spot, preemptible]
karpenter.sh/capacity-type: [spot]
kubernetes.azure.com/scalesetpriority: [spot]
{{- end }}
{{- if has .platform (list "eks" "generic") }}
eks.amazonaws.com/capacityType: [SPOT]
{{- end }}
{{- range $key, $value := .spotLabels }}
{{ $key }}: [{{ $value | quote }}]
{{- end }}
{{- end }}

{{/* Variables that say which nodes pods of jobs go to, for both processes. None is empty: the API server would drop its value, and GitOps see a difference. */}}
{{- define "shoal.nodes" -}}
- {name: SHOAL_PLATFORM, value: {{ .Values.platform | quote }}}
{{- with .Values.spotLabels }}
- {name: SHOAL_SPOT_LABELS, value: {{ include "shoal.pairs" . | quote }}}
{{- end }}
{{- with .Values.spotTaints }}
- {name: SHOAL_SPOT_TAINTS, value: {{ include "shoal.pairs" . | quote }}}
{{- end }}
{{- with .Values.trainer.nodeSelector }}
- {name: SHOAL_NODE_SELECTOR, value: {{ include "shoal.pairs" . | quote }}}
{{- end }}
{{- end }}

{{/* A map as key=value,key=value. */}}
{{- define "shoal.pairs" -}}
{{- $pairs := list }}
{{- range $key, $value := . }}{{ $pairs = append $pairs (printf "%s=%s" $key $value) }}{{ end }}
{{- join "," $pairs }}
{{- end }}
